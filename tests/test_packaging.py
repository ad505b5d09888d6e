"""The package as users install it: nothing forgotten, and imports that point down."""

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT, TIMEOUT_S

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML, 3.10 does not")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_folder_of_code_is_packaged() -> None:
    expected = set()
    for root, prefix in (("pl_pipe", "pl_pipe"), ("conf", "pl_pipe.conf"), ("recipes", "pl_pipe.recipes")):
        for file in (ROOT / root).rglob("__init__.py"):
            inner = file.parent.relative_to(ROOT / root).parts
            expected.add(".".join([prefix, *inner]))
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == expected
    for folder in ("pl_pipe", "recipes"):
        bare = {file.parent for file in (ROOT / folder).rglob("*.py")} - {
            file.parent for file in (ROOT / folder).rglob("__init__.py")
        }
        assert not bare, f"folders without __init__.py are not packaged: {bare}"


def test_wheel_holds_configuration_recipes_and_typing_marker(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".venv", ".git", "outputs", "build", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", tmp_path, source]
    subprocess.run(command, check=True, timeout=TIMEOUT_S, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    configs = {f"pl_pipe/conf/{file.relative_to(ROOT / 'conf')}" for file in (ROOT / "conf").rglob("*.yaml")}
    recipes = {f"pl_pipe/recipes/{file.relative_to(ROOT / 'recipes')}" for file in (ROOT / "recipes").rglob("*.py")}
    assert configs <= names
    assert recipes <= names
    embedded = {f"pl_pipe/{file.relative_to(ROOT)}" for file in (ROOT / "recipes").glob("*/embedded/*")}
    assert embedded
    assert embedded <= names
    assert "pl_pipe/py.typed" in names
    assert not any(name.startswith(("tests", "conf/", "recipes/")) for name in names)


def test_constraints_pin_every_dependency() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(line.split("==")[0]) for line in lines if "==" in line}
    wanted = list(PROJECT["project"]["dependencies"])
    for extra in PROJECT["project"]["optional-dependencies"].values():
        wanted += extra
    names = {canonicalize_name(Requirement(requirement).name) for requirement in wanted}
    assert names - {"pl-pipe"} <= pinned


def test_ranges_admit_the_constraints() -> None:
    """The declared ranges and the tested set do not contradict each other."""
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    versions = {canonicalize_name(name): number for name, number in pinned.items()}
    for text in PROJECT["project"]["dependencies"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), text


@pytest.mark.parametrize("file", sorted((ROOT / "pl_pipe").rglob("*.py")), ids=lambda file: str(file.relative_to(ROOT)))
def test_library_imports_no_recipe_and_prints_nothing(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            assert not any("recipes" in alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert "recipes" not in (node.module or "")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print"


def test_importing_the_package_is_quick_and_quiet() -> None:
    code = "import sys, pl_pipe; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], timeout=TIMEOUT_S, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
