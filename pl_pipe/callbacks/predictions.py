"""Collects what `predict_step` returned on all ranks and writes it as one file, in the data set's order."""

import csv
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from typing_extensions import override

from pl_pipe.callbacks.replicas import data_replicas
from pl_pipe.errors import ConfigError

FORMATS = ("pt", "csv")


class PredictionWriter(BasePredictionWriter):
    """Writes `predictions.pt` (any outputs) or `predictions.csv` (one row a sample) into `folder`.

    The `.pt` file holds `{"outputs": …, "index": …}`: per-sample tensors are joined along the first dimension and
    sorted by sample. Other outputs stay a list with one entry a batch, and `index` lists each batch's samples. Variants
    that are evaluated in several arrays come together where they are joined; else each array has a file of its own.
    """

    def __init__(self, folder: Path, file_format: str = "pt") -> None:
        super().__init__(write_interval="epoch")
        if file_format not in FORMATS:
            raise ConfigError(f"predict.format={file_format} is unknown; choose one of {', '.join(FORMATS)}")
        self.path = folder / f"predictions.{file_format}"
        self._joined: dict[str, Any] = {}

    @override
    def on_predict_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Not `write_on_epoch_end`: that is for who has predictions, and here all ranks must meet."""
        predictions, batch_indices = trainer.predict_loop.predictions, trainer.predict_loop.epoch_batch_indices
        loaders = trainer.predict_dataloaders
        if isinstance(loaders, list) and len(loaders) > 1:
            raise ConfigError(
                f"predict has {len(loaders)} data loaders, PredictionWriter writes one; give it one predict_dataloader"
            )
        indices = batch_indices[0] if batch_indices else []
        outputs = move_data_to_device(list(predictions), torch.device("cpu"))
        reports = trainer.global_rank < data_replicas(trainer)  # a pipeline's other ranks have nothing to add
        parts = _gather((outputs, [list(batch) for batch in indices]) if reports else ([], []))
        if trainer.is_global_zero:
            self._write(
                [output for part in parts for output in part[0]],
                [batch for part in parts for batch in part[1]],
                arrays_before=getattr(trainer.strategy, "arrays_before", 0),
            )

    def _write(self, outputs: list[Any], batches: list[list[int]], *, arrays_before: int) -> None:
        index = torch.tensor([sample for batch in batches for sample in batch])
        joined, path = join_batches(outputs, index), self.path
        if not arrays_before:
            self._joined = {}
        if isinstance(joined, dict) and (self._joined or not arrays_before):
            joined = self._joined = {**self._joined, **joined}
        elif arrays_before:
            path = path.with_stem(f"{path.stem}_{arrays_before}")
        part = path.with_suffix(path.suffix + ".part")
        if path.suffix == ".csv":
            rows = csv_rows(joined, index.sort().values)  # refuses before a file is opened
            with part.open("w", newline="") as file:
                csv.writer(file).writerows(rows)
        else:
            kept = batches if joined is outputs else index.sort().values
            torch.save({"outputs": joined, "index": kept}, part)
        part.replace(path)


def join_batches(outputs: list[Any], index: Tensor) -> Any:
    """Per-batch outputs as one per-sample value in the order of `index`; the list itself where that has no meaning."""
    order = index.argsort()
    if outputs and all(isinstance(output, dict) for output in outputs):
        joined = {name: join_batches([output[name] for output in outputs], index) for name in outputs[0]}
        return outputs if any(isinstance(value, list) for value in joined.values()) else joined
    if outputs and all(isinstance(output, Tensor) and output.ndim for output in outputs):
        values = torch.cat(outputs)
        if len(values) == len(index):
            return values[order]
    return outputs


def csv_rows(joined: Any, index: Tensor) -> list[list[Any]]:
    """A header and one row a sample; matrices become numbered columns."""
    columns = joined if isinstance(joined, dict) else {"prediction": joined}
    header, cells = ["index"], [index.tolist()]
    for name, values in columns.items():
        if not isinstance(values, Tensor) or values.ndim > 2 or len(values) != len(index):
            raise ConfigError(
                f"predict.format=csv needs one number or vector a sample, predict_step's {name!r} is not; "
                f"set predict.format=pt"
            )
        if values.ndim == 1:
            header.append(name)
            cells.append(values.tolist())
        else:
            header += [f"{name}_{k}" for k in range(values.shape[1])]
            cells += [column.tolist() for column in values.T]
    return [header, *(list(row) for row in zip(*cells, strict=True))]


def _gather(part: Any) -> list[Any]:
    """All ranks' parts on rank 0; nothing elsewhere."""
    if not (dist.is_available() and dist.is_initialized()):
        return [part]
    parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(part, parts, dst=0)
    return parts or []
