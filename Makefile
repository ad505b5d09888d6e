# On a bare machine with Python 3.11 and make: `make install`, `make demo` and `make test`.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: install demo test test-slow lint types layers unit support-matrix bench-pipedream bench-hetero bench-adapt bench-fusion clean

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

test-slow: $(INSTALLED)  ## The tests that take longest too, with the libraries of tests/ordinary
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,ordinary]"
	PL_PIPE_SLOW=1 $(MAKE) test

support-matrix: $(INSTALLED)  ## Write docs/support.md anew from the marks of the tests
	$(BIN)/python tests/support_matrix.py

bench-pipedream: $(INSTALLED)  ## Pipelines against data parallelism over rehearsed links; needs root and iproute2, and some three hours
	$(if $(filter 0,$(shell id -u)),,sudo -E) $(BIN)/python benchmarks/pipedream/speedup.py; failed=$$?; \
	$(BIN)/python benchmarks/pipedream/report.py && exit $$failed

bench-hetero: $(INSTALLED)  ## Uneven workers: decisions, round trips, samples/s and time to an accuracy; wants an idle machine
	$(BIN)/python benchmarks/hetero/decisions.py
	$(BIN)/python benchmarks/hetero/coordinator.py
	$(BIN)/python benchmarks/hetero/distance.py
	$(BIN)/python benchmarks/hetero/comparison.py

bench-adapt: $(INSTALLED)  ## What adapting costs and gains; needs root and iproute2; CIFAR10=FOLDER adds the adaptive batch
	$(BIN)/python benchmarks/adapt/allreduce.py
	$(BIN)/python benchmarks/adapt/monitoring.py
	$(if $(CIFAR10),$(if $(filter 0,$(shell id -u)),,sudo -E) $(BIN)/python benchmarks/adapt/batch.py --root $(CIFAR10))
	$(if $(filter 0,$(shell id -u)),,sudo -E) $(BIN)/python benchmarks/adapt/interference.py
	$(if $(filter 0,$(shell id -u)),,sudo -E) $(BIN)/python benchmarks/adapt/scaling.py
	$(if $(filter 0,$(shell id -u)),,sudo -E) $(BIN)/python benchmarks/adapt/provision.py
	$(if $(filter 0,$(shell id -u)),,sudo -E) $(BIN)/python benchmarks/adapt/provision.py --schedule 2:40,3:40,2:40

bench-fusion: $(INSTALLED)  ## Variants of six workloads on a GPU against other ways to train them; hours for all, OPTIONS="--workload bert --variants 8" for less; goes on where it was stopped on the same day, or with RUN=NAME
	failed=; \
	$(BIN)/python benchmarks/fusion/gpu.py --out benchmarks/fusion/results $(if $(RUN),--run $(RUN)) $(OPTIONS) || failed="$$failed gpu.py"; \
	$(BIN)/python benchmarks/fusion/partial.py --out benchmarks/fusion/results $(if $(RUN),--run $(RUN)) || failed="$$failed partial.py"; \
	$(if $(CIFAR10),$(BIN)/python benchmarks/fusion/convergence.py --root $(CIFAR10) --out benchmarks/fusion/results || failed="$$failed convergence.py";) \
	$(BIN)/python benchmarks/fusion/figures.py benchmarks/fusion/results $(if $(RUN),--run $(RUN)) || failed="$$failed figures.py"; \
	$(BIN)/python benchmarks/fusion/speed_report.py benchmarks/fusion/results $(if $(RUN),--run $(RUN)) || failed="$$failed speed_report.py"; \
	test -z "$$failed" || { echo "not all could be measured:$$failed"; exit 1; }

# Installs once; again only when what is to be installed changes. The stamp comes last, so a broken install is retried.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
