"""Checkpoints are judged before they are used."""

import functools
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import nn

from pl_pipe.errors import CheckpointError
from pl_pipe.runtime.checkpoint import check_fits, check_resumable, read_facts
from tests.conftest import only_run


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as plain Lightning writes it."""
    from lightning.pytorch.demos.boring_classes import BoringModel

    path = tmp_path_factory.mktemp("plain") / "plain.ckpt"
    trainer = L.Trainer(
        max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        limit_val_batches=0, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(BoringModel())
    trainer.save_checkpoint(path)
    return path


def test_facts_of_a_plain_checkpoint(written: Path) -> None:
    facts = read_facts(written)
    assert (facts.global_step, facts.resumable) == (3, True)
    assert facts.shapes == {"layer.weight": (2, 32), "layer.bias": (2,)}
    check_resumable(facts)


@pytest.mark.parametrize("part", [0.0, 0.01, 0.3, 0.5, 0.9, 0.999])
def test_truncated_files_are_refused(written: Path, tmp_path: Path, part: float) -> None:
    content = written.read_bytes()
    cut = tmp_path / "cut.ckpt"
    cut.write_bytes(content[: int(len(content) * part)])
    with pytest.raises(CheckpointError, match=r"cut.ckpt \(\d+ bytes\) cannot be read: it is truncated or not"):
        read_facts(cut)


def test_a_damaged_archive_is_refused(written: Path, tmp_path: Path) -> None:
    content = bytearray(written.read_bytes())
    content[: len(content) // 2] = bytes(len(content) // 2)
    broken = tmp_path / "broken.ckpt"
    broken.write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_facts(broken)


def test_missing_foreign_and_weights_only_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none.ckpt does not exist; ckpt_path takes last, best or a file"):
        read_facts(tmp_path / "none.ckpt")
    torch.save({"model": {}}, tmp_path / "foreign.ckpt")
    with pytest.raises(CheckpointError, match="has no state_dict, so Lightning did not write it"):
        read_facts(tmp_path / "foreign.ckpt")
    torch.save({"state_dict": {"weight": torch.zeros(2)}}, tmp_path / "weights.ckpt")
    with pytest.raises(CheckpointError, match="holds weights only, no optimizer or loop state"):
        check_resumable(read_facts(tmp_path / "weights.ckpt"))


def test_objects_are_loaded_only_when_trusted(tmp_path: Path) -> None:
    content = {"state_dict": {"weight": torch.zeros(2)}, "hyper_parameters": {"loss": functools.partial(print, 1)}}
    torch.save(content, tmp_path / "objects.ckpt")
    with pytest.raises(CheckpointError, match=r"can run code; if you trust the file, set trust_checkpoint=true"):
        read_facts(tmp_path / "objects.ckpt")
    assert read_facts(tmp_path / "objects.ckpt", trusted=True).shapes == {"weight": (2,)}


def test_another_models_checkpoint_is_refused_with_names(written: Path) -> None:
    facts = read_facts(written)
    model = nn.Sequential()
    model.layer = nn.Linear(32, 2)
    check_fits(facts, model)
    model.layer = nn.Linear(31, 2)
    with pytest.raises(CheckpointError, match=r"1 of another shape \(layer.weight \[2, 32\] instead of \[2, 31\]\)"):
        check_fits(facts, model)
    with pytest.raises(
        CheckpointError, match=r"2 missing \(0.weight, 0.bias\); 2 unknown \(layer.weight, layer.bias\)"
    ):
        check_fits(facts, nn.Sequential(nn.Linear(2, 2)))


def test_extra_state_and_lazy_parameters_are_no_mismatch(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

        def set_extra_state(self, state: object) -> None:
            pass

    model = nn.Sequential(Extra(2, 2))
    torch.save({"state_dict": model.state_dict()}, tmp_path / "extra.ckpt")
    check_fits(read_facts(tmp_path / "extra.ckpt"), model)
    check_fits(read_facts(tmp_path / "extra.ckpt"), nn.Sequential(nn.LazyLinear(2)))


def test_a_checkpoint_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.fabric.plugins.io import TorchCheckpointIO

    from pl_pipe.strategies.checkpoint_io import AtomicCheckpointIO

    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)

    def full_disk(self: object, checkpoint: object, path: Path, storage_options: object = None) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TorchCheckpointIO, "save_checkpoint", full_disk)
    with pytest.raises(OSError, match="No space left"):
        AtomicCheckpointIO().save_checkpoint({"step": 2}, path)
    assert torch.load(path, weights_only=True) == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_cut_checkpoint_is_named_to_a_script(tmp_path: Path) -> None:
    from pl_pipe.strategies.checkpoint_io import AtomicCheckpointIO

    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"state_dict": {"weight": torch.ones(5000)}}, path)
    assert AtomicCheckpointIO().load_checkpoint(path).keys() == {"state_dict"}
    path.write_bytes(path.read_bytes()[:10_000])
    with pytest.raises(CheckpointError, match=r"last.ckpt \(10000 bytes\) cannot be read: it is truncated.*older one"):
        AtomicCheckpointIO().load_checkpoint(path)
    with pytest.raises(FileNotFoundError):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "none.ckpt")


def test_our_checkpoint_loads_in_plain_lightning(trained: Path) -> None:
    from pl_pipe.recipes.vision.classifier import ImageClassifier

    best = only_run(trained) / "checkpoints" / "best.ckpt"
    model = ImageClassifier.load_from_checkpoint(best, weights_only=True)
    assert model.hparams["arch"] == "vgg16"
    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == read_facts(best).shapes
