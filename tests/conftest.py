"""Shared fixtures: the command line in a process of its own, a small trained run, and the optional data folder."""

import fcntl
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

ROOT = Path(__file__).parents[1]
# A VGG-16 eight channels wide on 48 random images: a second or two a run.
TINY = (
    "data=synthetic",
    "data.num_samples=48",
    "data.num_val_samples=20",
    "data.batch_size=8",
    "recipe.width=0.01",
    "trainer.max_epochs=2",
)
TIMEOUT_S = 900
RANK_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GROUP_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE")

Inside = Callable[..., tuple[int, str, str]]

settings.register_profile("any machine", deadline=None)  # a busy one takes its time
settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests whose many processes import everything anew run where `PL_PIPE_SLOW=1` is set, as in CI."""
    for item in items:
        if item.get_closest_marker("slow") is not None and "PL_PIPE_SLOW" not in os.environ:
            item.add_marker(pytest.mark.skip(reason="takes most of a minute; set PL_PIPE_SLOW=1"))


def run_cli(
    *arguments: str, cwd: Path, launcher: tuple[str, ...] = (), timeout: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """`pl-pipe ARGUMENTS` in `cwd`; fails the test if any process it started is left behind."""
    command = [*launcher, str(Path(sys.executable).parent / "pl-pipe"), *arguments]
    mark = f"{os.getpid()}-{os.urandom(8).hex()}"
    done = subprocess.run(
        command,
        cwd=cwd,
        env=child_environment(PL_PIPE_TEST_MARK=mark),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    left = marked_processes(mark)
    for process in left:
        process.kill()
    assert not left, f"processes left behind: {left}"
    return done


def child_environment(**more: str) -> dict[str, str]:
    """For a process that knows nothing of the tests'. Ranks that it starts meet at a port that nobody gets by chance:
    Lightning looks for a free one some time before rank 0 takes it."""
    own = ("PL_", "HYDRA_", *RANK_VARIABLES)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return {**environment, "MASTER_PORT": str(20_000 + int.from_bytes(os.urandom(4)) % 12_000), **more}


def marked_processes(mark: str) -> list[psutil.Process]:
    """Live processes that inherited the environment mark of one command."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("PL_PIPE_TEST_MARK") == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def only_run(root: Path, recipe: str = "vgg16") -> Path:
    """The one run directory of `recipe` under `root`."""
    (run,) = (root / "outputs" / recipe).iterdir()
    return run


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a tiny VGG-16 was trained; `only_run(trained)` is its run directory."""
    folder = tmp_path_factory.mktemp("trained")
    done = run_cli("fit", *TINY, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(autouse=True)
def no_ranks_left() -> Iterator[None]:
    """A distributed strategy, with one rank too, leaves its place in the environment and a store that answers at its
    port: ranks that later tests start would take both for their own."""
    known = _has_process_group()
    before = {name: os.environ.get(name) for name in RANK_VARIABLES}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
    if not known and _has_process_group():
        sys.modules["torch.distributed"].destroy_process_group()


def _has_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")  # not imported for tests that do without
    return distributed is not None and distributed.is_available() and bool(distributed.is_initialized())


@pytest.fixture
def network() -> Iterator[None]:
    """For tests that change the machine's network, or look whether somebody did: one at a time, over all processes."""
    with (Path(tempfile.gettempdir()) / "pl_pipe_tests_network.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """A private copy of `trained`, for tests that write into it."""
    import shutil

    shutil.copytree(trained, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inside]:
    """Calls the command line in this process (no imports to wait for): returns exit code, stdout, stderr."""
    import io
    from contextlib import redirect_stderr, redirect_stdout

    from pl_pipe.cli import main

    monkeypatch.setattr(sys, "path", list(sys.path))
    environment = dict(os.environ)

    def call(*arguments: str, cwd: Path = tmp_path) -> tuple[int, str, str]:
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["pl-pipe", *arguments])
        out, err = io.StringIO(), io.StringIO()
        code = 0
        with redirect_stdout(out), redirect_stderr(err):
            try:
                main()
            except SystemExit as exit_:
                code = exit_.code if isinstance(exit_.code, int) else 1
        return code, out.getvalue(), err.getvalue()

    yield call
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(scope="session")
def cifar10_subset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CIFAR-10 subset as an image folder, where the machine has one."""
    data = Path(os.environ.get("PL_PIPE_TEST_DATA", ROOT.parent / "shared" / "data"))
    archive = data / "cifar10_subset.tar"
    if not archive.is_file():
        pytest.skip("no cifar10_subset.tar; set PL_PIPE_TEST_DATA to the folder that holds it")
    folder = tmp_path_factory.mktemp("cifar10")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / "cifar10"


def image_folder(root: Path, *, splits: tuple[str, ...], classes: int, images: int = 2, size: int = 40) -> Path:
    """A folder of random class folders, as ImageNet is laid out."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    for split in splits:
        for label in range(classes):
            folder = root / split / f"class_{label}"
            folder.mkdir(parents=True)
            for number in range(images):
                pixels = random.integers(0, 256, (size, size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.jpg")
    return root
