"""Draws who averaged with whom among uneven workers. strategy's report -> *AveragingPicture* -> files."""

import json
from pathlib import Path

import lightning as L
from lightning.fabric.utilities import rank_zero_info
from typing_extensions import override

from pl_pipe.errors import ConfigError
from pl_pipe.strategies.uneven.data_parallel import DataParallelStrategy
from pl_pipe.strategies.uneven.sdpipe import SDPipeStrategy


class AveragingPicture(L.Callback):
    """For uneven workers, `sdpipe` among them: writes averaging.png and averaging.json."""

    def __init__(self, folder: str | Path | None = None) -> None:
        """
        Args:
            folder: where the files go; by default the logger's folder, or else the trainer's `default_root_dir`.
        """
        self._folder = None if folder is None else Path(folder)

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit" and not isinstance(trainer.strategy, DataParallelStrategy | SDPipeStrategy):
            raise ConfigError(
                f"AveragingPicture draws who averaged with whom, and the trainer's strategy is "
                f"{type(trainer.strategy).__name__}; set strategy=partial_reduce, or leave the callback out"
            )

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy, logged = trainer.strategy, trainer.log_dir
        assert isinstance(strategy, DataParallelStrategy | SDPipeStrategy)
        if not trainer.is_global_zero:
            return
        from pl_pipe.report.averaging_chart import draw_averaging  # matplotlib takes a second to import

        folder = self._folder or Path(logged or trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        report = strategy.report
        speeds = {
            rank: worker.samples / worker.seconds for rank, worker in report.workers.items() if worker.seconds > 0
        }
        partners = {str(rank): {str(other): n for other, n in met.items()} for rank, met in report.partners.items()}
        name = (strategy.settings if isinstance(strategy, DataParallelStrategy) else strategy.uneven).synchronizer
        content = {"synchronizer": name, "partners": partners, "samples_per_s": speeds}
        (folder / "averaging.json").write_text(json.dumps(content, indent=2) + "\n")
        draw_averaging(report.partners, speeds, folder / "averaging.png", title=f"{name}: who averaged with whom")
        rank_zero_info(f"who averaged with whom: averaging.png and averaging.json in {folder}")
