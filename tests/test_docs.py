"""What the documents tell a newcomer to do is done here, word for word."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, TIMEOUT_S, child_environment, run_cli

FILE = re.compile(r"`([\w/.]+\.(?:py|yaml))`:\n\n```(?:python|yaml)\n(.*?)```", re.DOTALL)
SHELL = re.compile(r"```bash\n(pl-pipe .*?)```", re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # eight commands, each a process that imports everything anew
def test_the_recipe_tutorial_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "recipes.md").read_text()
    for name, content in FILE.findall(text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    commands = [line for block in SHELL.findall(text) for line in block.strip().splitlines()]
    assert len(commands) == 7
    for command in commands:
        done = run_cli(*command.split()[1:], cwd=tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
    assert "a small network of mine" in re.sub(r"[\s│]+", " ", done.stdout)
    run = sorted((tmp_path / "outputs" / "mine").iterdir())[0]
    done = run_cli("validate", str(run), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (run / "validate.json").is_file()
    assert (tmp_path / "margins" / "evaluation.png").is_file()


def test_the_readme_snippet_runs(tmp_path: Path) -> None:
    snippet, _ = _snippets("README.md")
    quick = snippet.replace("max_epochs=1", "max_epochs=1, limit_train_batches=2, limit_val_batches=1")
    assert quick != snippet
    done = subprocess.run(
        [sys.executable, "-c", quick], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d+ samples/s, best accuracy 0\.\d\d", done.stdout)


def test_the_pipeline_snippet_runs(tmp_path: Path) -> None:
    *_, snippet = _snippets("README.md")
    quick = re.sub(r"devices=\d, max_epochs=\d", "devices=2, max_epochs=1, limit_train_batches=3", snippet)
    assert quick != snippet
    script = tmp_path / "script.py"
    script.write_text(quick)
    environment = child_environment(PL_PIPE_CACHE=str(tmp_path / "cache"), OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "a pipeline of 2 stages" in done.stderr


def _snippets(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md"))]
)
def test_links_between_the_documents_hold(page: str) -> None:
    file = ROOT / page
    for target in re.findall(r"\]\((?!http)([^)#]+)", file.read_text()):
        assert (file.parent / target).exists(), f"{page} links to {target}"


def test_the_readme_names_every_recipe_and_strategy() -> None:
    text = (ROOT / "README.md").read_text()
    for group in ("recipe", "strategy", "data"):
        for choice in (ROOT / "conf" / group).glob("*.yaml"):
            assert f"{choice.stem}" in text, f"{group}={choice.stem} is not in the README"


def test_the_fusion_snippets_run(capsys: pytest.CaptureFixture[str]) -> None:
    _, leaving, plain = _snippets("docs/fusion.md")
    exec(leaving, {})
    exec(plain, {})
    printed = capsys.readouterr().out
    assert re.search(r"0 +linear +shared input +10", printed)
    assert re.search(r"2 +dropout +own masks +10", printed)


@pytest.mark.slow
def test_the_fused_training_snippet_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(_snippets("docs/fusion.md")[0], {})
    assert "lr=0.03" in capsys.readouterr().out
