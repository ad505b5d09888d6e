"""`pl-pipe data prepare` as a user types it, against a local server."""

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from file_server import Shelf, serving
from test_data_preparation import CIFAR, packed

from tests.conftest import TIMEOUT_S, Inside

ARCHIVE = packed(CIFAR)


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    with serving(Shelf({"c.tar.gz": ARCHIVE})) as found:
        yield found


def settings(shelf: Shelf, root: Path) -> list[str]:
    md5 = hashlib.md5(ARCHIVE).hexdigest()
    return [
        f"data.root={root}",
        f"prepare.sources=[{{file: c.tar.gz, url: '{shelf.url}/c.tar.gz', md5: '{md5}'}}]",
        "prepare.pause_s=0",
    ]


def test_a_data_set_is_prepared_once(inside: Inside, shelf: Shelf, tmp_path: Path) -> None:
    shelf.cuts = [40]
    code, out, err = inside("data", "prepare", "cifar10", *settings(shelf, tmp_path / "data"))
    assert code == 0, err
    assert f"cifar10 is prepared in {tmp_path / 'data'}: cifar-10-batches-py/batches.meta" in out
    assert "Next: pl-pipe fit recipe=resnet56 data=cifar10" in out
    assert (tmp_path / "data" / "cifar-10-batches-py" / "data_batch_1").is_file()
    assert [wanted for _, wanted in shelf.asked] == [None, "bytes=40-"]
    code, out, err = inside("data", "prepare", "cifar10", *settings(shelf, tmp_path / "data"))
    assert code == 0, err
    assert "already; nothing to do" in out
    assert len(shelf.asked) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"], "the command left something beside the data"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no data set is named; name one of cifar10, imagenet, squad, wiki, wmt_ende"),
        (["cifar10", "squad"], "cifar10, squad are several names"),
        (["cifar100"], "Could not find 'prepare/cifar100'"),
        (["cifar10"], "data.root is not set"),
        (["cifar10", "data.root=x", "prepare.retries=-1"], "prepare.retries=-1"),
        (["cifar10", "data.root=x", "prepare.nonsense=1"], "nonsense"),
        (["cifar10", "data.root=x", "prepare.offline=true"], "Fetch by hand, put it there"),
        (["imagenet", "data.root=x"], "ILSVRC2012_img_train.tar (md5 1d675b47d978889d74fa0da5fadfb00e)"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_message(inside: Inside, arguments: list[str], words: str) -> None:
    code, _, err = inside("data", "prepare", *arguments)
    assert code == 1
    assert words in err
    assert "Traceback" not in err


def test_help_names_the_data_sets(inside: Inside) -> None:
    code, out, _ = inside("data", "prepare", "--help")
    assert code == 0
    assert "cifar10 data.root=FOLDER" in out
    assert "wmt_ende" in out


def test_a_preparation_of_ones_own_beside_the_command(inside: Inside, tmp_path: Path) -> None:
    (tmp_path / "kept_beside.py").write_text(
        "from pathlib import Path\n\n\nclass Mine:\n"
        "    def prepare(self, root, report):\n        (Path(root) / 'made').write_text('by me')\n"
    )
    (tmp_path / "own" / "prepare").mkdir(parents=True)
    (tmp_path / "own" / "prepare" / "mine.yaml").write_text("_target_: kept_beside.Mine\n")
    code, _, err = inside("data", "prepare", "mine", f"data.root={tmp_path}", "--config-dir", "own")
    assert code == 0, err
    assert (tmp_path / "made").read_text() == "by me"


def test_preparing_needs_no_torch() -> None:
    code = (
        "import sys; from pl_pipe.cli.front import prepare_hydra; prepare_hydra('prepare'); import pl_pipe.cli.data; "
        "from pl_pipe.recipes.preparation import cifar10, imagenet, squad, wiki, wmt_ende; "
        "from pl_pipe.recipes.language import shard_writer, squad_vocabulary; "
        "from pl_pipe.recipes.translation import vocabulary; "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=TIMEOUT_S, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
