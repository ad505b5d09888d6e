# On a bare machine with Python >= 3.10 and make: `make install`, `make demo` and `make test`.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: install demo test lint types layers unit support-matrix bench-pipedream clean

install: $(INSTALLED)  ## Into .venv: .venv/bin/pl-pipe

demo: $(INSTALLED)  ## Train VGG-16 on handwritten digits as a pipeline of four stages
	$(BIN)/pl-pipe fit recipe=vgg16 strategy=pipedream strategy.plan=straight trainer.devices=4

test: lint types layers unit  ## Everything CI runs

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy --strict pl_pipe recipes

layers: $(INSTALLED)
	$(BIN)/lint-imports --no-cache

unit: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile

support-matrix: $(INSTALLED)  ## Write docs/support.md anew from the marks of the tests
	$(BIN)/python tests/support_matrix.py

bench-pipedream: $(INSTALLED)  ## Pipelines against data parallelism over rehearsed links; needs root and iproute2, and about an hour and a half
	$(if $(filter 0,$(shell id -u)),,sudo -E) $(BIN)/python benchmarks/pipedream/speedup.py && $(BIN)/python benchmarks/pipedream/report.py

# Installs once; again only when what is to be installed changes. The stamp comes last, so a broken install is retried.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
