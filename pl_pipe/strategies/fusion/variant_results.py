"""What a fit of variants leaves behind: a checkpoint for each, a table, a picture. training -> *results* -> files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import lightning as L
from fsspec.core import url_to_fs
from typing_extensions import override

from pl_pipe.errors import ConfigError
from pl_pipe.log import get_logger
from pl_pipe.report.leaderboard import draw_curves
from pl_pipe.strategies.fusion.trainer_metrics import metrics_of_variants
from pl_pipe.strategies.fusion.variant_building import described, settings_text
from pl_pipe.strategies.fusion.variant_checkpoints import variant_checkpoint
from pl_pipe.strategies.fusion.variant_records import has_diverged

if TYPE_CHECKING:
    from pl_pipe.strategies.fusion.fused_variants import FusedVariants

log = get_logger(__name__)

TABLE, PICTURE, CHECKPOINTS = "variants.csv", "variants.png", "variants"


class VariantResults(L.Callback):
    """Writes when training ends. Without a folder, a logger or checkpoints to go by, nothing is written."""

    def __init__(self, strategy: "FusedVariants", folder: str | Path | None) -> None:
        self._strategy = strategy
        self._folder = folder

    @contextmanager
    def listening(self, trainer: Any) -> Iterator[None]:
        self._make_folder()
        trainer.callbacks.append(self)
        try:
            yield
        finally:
            trainer.callbacks.remove(self)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        training, records = self._strategy.training, self._strategy.records
        assert training is not None
        numbers = [training.variants[place].number for place in training.active]
        records.note(metrics_of_variants(trainer), trainer.global_step)
        records.trained_to(numbers, trainer.global_step)
        lost = [
            number
            for place, number in zip(training.active, numbers, strict=True)
            if has_diverged(training.modules[place])
        ]
        if lost:
            records.diverged(lost)
            log.warning(
                "of variants %s not all weights are finite numbers at the end; a lower learning rate or gradient "
                "clipping may help",
                ", ".join(map(str, lost)),
            )
        unknown = records.unknown_monitor
        if unknown is not None:
            log.warning(unknown)
        folder = self._place(trainer)
        if folder is None:
            return
        dump = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        if not trainer.is_global_zero:
            return
        self._write_table(folder)  # first: what was learned of the variants is in it, whatever happens to the rest
        _make(f"{folder}/{CHECKPOINTS}")
        for place, variant in enumerate(training.variants):
            own = variant_checkpoint(dump, training, place)
            path = f"{folder}/{CHECKPOINTS}/variant_{variant.number}.ckpt"
            self._strategy.checkpoint_io.save_checkpoint(own, path)

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Training was interrupted, or has failed: what is known of the variants is written, and no checkpoints, since
        it may have been in the middle of a step."""
        training, folder = self._strategy.training, self._place(trainer)
        if training is None or trainer.global_step == 0:
            return
        numbers = [training.variants[place].number for place in training.active]
        self._strategy.records.interrupted(numbers, trainer.global_step)
        if folder is None or not trainer.is_global_zero:
            return
        try:
            self._write_table(folder)
        except Exception as error:  # the one that ends the training is the one to be seen
            log.warning("%s could not be written: %s", TABLE, error)

    def _write_table(self, folder: str) -> None:
        labels = {number: f"{number}: {settings_text(choice)}" for number, choice in enumerate(self._strategy.choices)}
        files, place = _make(folder)
        with TemporaryDirectory() as here:
            self._strategy.leaderboard.write_csv(Path(here) / TABLE)
            draw_curves(self._strategy.records.curves, labels, Path(here) / PICTURE)
            for file in Path(here).iterdir():
                files.put_file(str(file), f"{place}/{file.name}")

    def _make_folder(self) -> None:
        """Before anything is trained, for it may not be possible."""
        if self._folder is None:
            return
        try:
            _make(str(self._folder))
        except Exception as error:  # each kind of store has its own
            why = getattr(error, "strerror", None) or described(error)
            raise ConfigError(f"folder={self._folder} cannot be made ({why}); name another one") from error

    def _place(self, trainer: Any) -> str | None:
        """A path or URL."""
        if trainer.fast_dev_run:
            return None
        if self._folder is not None:
            return str(self._folder)
        if trainer.loggers and trainer.log_dir:
            return str(trainer.log_dir)
        saved = [callback.dirpath for callback in trainer.checkpoint_callbacks if getattr(callback, "dirpath", None)]
        return str(saved[0]) if saved else None


def _make(folder: str) -> tuple[Any, str]:
    files, place = url_to_fs(folder)
    files.makedirs(place, exist_ok=True)
    return files, place
