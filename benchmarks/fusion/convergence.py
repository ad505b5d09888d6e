"""ResNet-18 on CIFAR-10 with three learning rates: variants trained as one, and each by itself. -> convergence.csv

    python benchmarks/fusion/convergence.py --root DIR_OF_CIFAR10 --out DIR [--epochs 8] [--arithmetic fp64 tf32]

Adam, with rates that fall to zero by a cosine (`--schedule constant`: they stay). Fused and separate runs differ by the
order of floating-point sums, which training amplifies; so there are two controls. In `fp64` least is there to amplify
(`fp32` is without TF32 and with deterministic kernels); and of `tf32` there is a second separate run whose convolutions
cuDNN chooses anew: how far two runs of one model part. Largest differences are printed. A curve is written when its run
has ended; a second call trains what is missing.
"""

import argparse
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from speed_rows import append, check_columns, gpu_name, now, read
from torch.utils.data import DataLoader, TensorDataset
from workloads import Trained, loss_of

from pl_pipe.recipes.vision.cifar10 import Cifar10Data
from pl_pipe.strategies import FusionStrategy

RATES = (0.002, 0.001, 0.0005)
FUSED, SEPARATE, OTHER_KERNELS = "fused", "separate", "separate, other kernels"
PRECISION = {"tf32": "32-true", "fp32": "32-true", "fp64": "64-true"}
"""Lightning's, by arithmetic."""
COLUMNS = (
    "arithmetic", "lr", "epoch", "run", "val_loss", "epochs", "images", "precision", "formulation", "schedule", "date",
    "gpu",
)  # fmt: skip
Curves = dict[tuple[str, str, float], list[float]]
"""Validation losses after every epoch, by arithmetic, run and learning rate."""


class Validated(Trained):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", loss_of("resnet18", self.net(batch[0]), batch[1]))


class Falling(Validated):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


SCHEDULES: dict[str, type[Validated]] = {"cosine": Falling, "constant": Validated}


class Curve(L.Callback):
    def __init__(self) -> None:
        self.losses: list[dict[str, float]] = []

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.losses.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def images(root: str, device: str, limit: int) -> list[TensorDataset]:
    """Those to train and those to validate with, on the device."""
    data = Cifar10Data(root=root, augment=False)
    data.setup("fit")
    parts = []
    for samples in (data.train_set, data.val_set):
        places = range(0, len(samples), max(1, len(samples) // limit) if limit else 1)
        found = [samples[place] for place in places]
        x, y = torch.stack([image for image, _ in found]), torch.tensor([label for _, label in found])
        parts.append(TensorDataset(x.to(device), y.to(device)))
    return parts


def loaders(parts: list[TensorDataset]) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Shuffled by a generator of their own."""
    train, validate = parts
    generator = torch.Generator().manual_seed(1)
    return DataLoader(train, 128, shuffle=True, generator=generator), DataLoader(validate, 500)


def run(
    strategy: Any, module: L.LightningModule, epochs: int, precision: Any, parts: list[TensorDataset], device: str
) -> list[dict[str, float]]:
    curve = Curve()
    trainer = L.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu", devices=1, max_epochs=epochs, strategy=strategy,
        precision=precision, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[curve],
    )  # fmt: skip
    trainer.fit(module, *loaders(parts))
    return curve.losses


@contextmanager
def computing(kind: str, *, tuned: bool = False) -> Iterator[None]:
    """Within the block, float32 is computed so; `tuned` lets cuDNN choose other kernels than it would by itself."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark
    cudnn.allow_tf32 = matmul.allow_tf32 = kind == "tf32"
    cudnn.benchmark = tuned
    torch.use_deterministic_algorithms(not tuned, warn_only=True)
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark = before
        torch.use_deterministic_algorithms(False)


def named(curve: list[dict[str, float]], number: int | None = None) -> list[float]:
    """Validation losses of one run, or of one variant of a fused one."""
    return [losses["val_loss" if number is None else f"val_loss/variant_{number}"] for losses in curve]


def differences(curves: Curves, kind: str) -> list[str]:
    """How far curves part from those of separate runs, by learning rate."""
    lines = []
    for name in (FUSED, OTHER_KERNELS):
        for lr in RATES:
            curve, reference = curves.get((kind, name, lr), []), curves.get((kind, SEPARATE, lr), [])
            if curve and reference:
                apart = max(abs(one - other) for one, other in zip(curve, reference, strict=True))
                lines.append(f"{kind}, lr {lr}, {name}: {apart:.2g} at most from the separate run")
    return lines


def curves_in(path: Path, own: Mapping[str, Any]) -> Curves:
    """Those that are there already, of trainings like this one."""
    found: Curves = {}
    for row in read(path):
        if all(row[name] == str(value) for name, value in own.items()):
            found.setdefault((row["arithmetic"], row["run"], float(row["lr"])), []).append(float(row["val_loss"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="a folder with train/<class>/ and test/<class>/ images")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--formulation", default="auto")
    parser.add_argument("--arithmetic", nargs="+", default=["fp64", "tf32"], choices=PRECISION)
    parser.add_argument("--schedule", default="cosine", choices=SCHEDULES)
    parser.add_argument("--limit", type=int, default=0, help="about so many images of each split; 0 for all")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    path = options.out / "convergence.csv"
    check_columns(path, COLUMNS)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = images(options.root, device, options.limit)
    own = {
        "epochs": options.epochs, "images": len(parts[0]), "formulation": options.formulation,
        "schedule": options.schedule, "gpu": gpu_name(),
    }  # fmt: skip
    curves = curves_in(path, own)

    def keep(kind: str, name: str, by_rate: dict[float, list[float]]) -> None:
        curves.update({(kind, name, lr): losses for lr, losses in by_rate.items()})
        rows = [
            {
                "arithmetic": kind,
                "lr": lr,
                "epoch": epoch,
                "run": name,
                "val_loss": loss,
                **own,
                "precision": PRECISION[kind],
                "date": now(),
            }
            for lr, losses in by_rate.items()
            for epoch, loss in enumerate(losses, 1)
        ]
        append(path, COLUMNS, *rows)

    def trained(strategy: Any, kind: str, lr: float) -> list[dict[str, float]]:
        L.seed_everything(1, verbose=False)
        module = SCHEDULES[options.schedule]("resnet18", lr=lr)
        return run(strategy, module, options.epochs, PRECISION[kind], parts, device)

    for kind in options.arithmetic:
        with computing(kind):
            if any((kind, FUSED, lr) not in curves for lr in RATES):
                fusion = FusionStrategy([{"lr": lr} for lr in RATES], formulation=options.formulation)
                fused = trained(fusion, kind, RATES[0])
                assert fusion.fusion_facts is not None
                print(f"{kind}: computed as {fusion.fusion_facts.chosen}", flush=True)
                keep(kind, FUSED, {lr: named(fused, number) for number, lr in enumerate(RATES)})
        for name in (SEPARATE, OTHER_KERNELS) if kind == "tf32" else (SEPARATE,):
            with computing(kind, tuned=name == OTHER_KERNELS):
                for lr in RATES:
                    if (kind, name, lr) not in curves:
                        keep(kind, name, {lr: named(trained("auto", kind, lr))})
        print("\n".join(differences(curves, kind)), flush=True)


if __name__ == "__main__":
    main()
