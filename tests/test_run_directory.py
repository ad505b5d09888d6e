"""Run directories: nothing of an earlier run is lost, and users' own choices fit in."""

from pathlib import Path

from pl_pipe.cli.run_directory import RunDirectory
from tests.conftest import TINY, Inside, only_run


def test_a_restarted_job_keeps_its_earlier_metrics(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.keep_earlier_metrics()
    for number in range(3):
        (tmp_path / "metrics.csv").write_text(f"part {number}")
        run.keep_earlier_metrics()
    kept = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert kept == {f"metrics_{number}.csv": f"part {number}" for number in range(3)}


def test_discarding_spares_what_a_run_has_made(tmp_path: Path) -> None:
    for name, keeps in (("record", False), ("used", True)):
        folder = tmp_path / "outputs" / "vgg16" / name
        (folder / ".hydra").mkdir(parents=True)
        for file in ("fit.log", "fit_rank1.log", "train_ddp_process_1.log", "hparams.yaml"):
            (folder / file).touch()
        if keeps:
            (folder / "checkpoints").mkdir()
        RunDirectory(folder).discard_unless_used("fit", with_parents=True)
        assert folder.is_dir() == keeps


def test_a_users_strategy_with_an_introduction(inside: Inside, tmp_path: Path) -> None:
    folder = tmp_path / "conf" / "strategy"
    folder.mkdir(parents=True)
    text = "_target_: pl_pipe.strategies.native.single\nabout: {summary: mine, max_devices: 1}\n"
    (folder / "mine.yaml").write_text(text)
    code, _, err = inside("fit", "--config-dir", "conf", "strategy=mine", *TINY, "trainer.max_epochs=1")
    assert code == 0, err
    assert (only_run(tmp_path) / "summary.json").is_file()
    code, _, err = inside("fit", "--config-dir", "conf", "strategy=mine", "trainer.devices=2")
    assert (code, "strategy=mine trains on 1 device" in err) == (1, True)
    (folder / "mine.yaml").write_text(text.replace("summary", "sumary"))
    code, _, err = inside("fit", "--config-dir", "conf", "strategy=mine")
    assert (code, "strategy.about cannot be read: Key 'sumary'" in err) == (1, True)


def test_a_run_is_found_from_anywhere_with_its_users_package(inside: Inside, tmp_path: Path) -> None:
    home, away = tmp_path / "my home", tmp_path / "away"
    (home / "conf" / "recipe").mkdir(parents=True)
    away.mkdir()
    (home / "at_home.py").write_text(
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "class Mine(BoringModel):\n"
        "    def validation_step(self, batch, batch_idx):\n"
        "        self.log('val_loss', self.layer(batch).sum())\n"
    )
    (home / "conf" / "recipe" / "mine.yaml").write_text("_target_: at_home.Mine\n")
    (home / "conf" / "data").mkdir()
    (home / "conf" / "data" / "boring.yaml").write_text(
        "_target_: lightning.pytorch.demos.boring_classes.BoringDataModule\n"
    )
    settings = ["--config-dir", "conf", "recipe=mine", "data=boring", "trainer.max_epochs=1"]
    code, _, err = inside("fit", *settings, cwd=home)
    assert code == 0, err
    code, _, err = inside("validate", str(only_run(home, "mine")), cwd=away)
    assert code == 0, err
    assert (only_run(home, "mine") / "validate.json").is_file()
