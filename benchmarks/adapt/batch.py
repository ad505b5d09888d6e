"""Small, large and adaptive batches on ResNet-56 and CIFAR-10: accuracy and time. After KungFu's experiment.

    sudo -E .venv/bin/python benchmarks/adapt/batch.py --root FOLDER   # with train/<class>/ and test/<class>/

Four hosts with slow links, where a step's sum has its price: larger batches make fewer of them. Images are made
smaller, so that a processor gets through some epochs. Time is that of the epochs, without start and validation. Runs
that ended are not repeated.

`batch_epochs.csv` has the accuracy after every epoch, `batch.csv` a row for each run: its best accuracy, and
`to_target_s`, the time until it was first within a point of the small batch's best accuracy, also as a share of the
time that the small batch took to come there itself. Both keep what other calls measured in the same setting (`--only`).
"""

import argparse
import csv
from pathlib import Path

import series
from runs import Failures, Row, draw_lines, keep_rows, of_setting, read_rows, setting_of, steps, trained_in

from pl_pipe.cluster import LabConfig, LinkConfig

SETTING = ("ranks", "small", "large", "most", "policy", "epochs", "image_size", "rate", "lr", "warmup_epochs", "seed")
POINT = 0.01


def main() -> None:
    options = _options()
    folder, failures, setting = Path(options.out), Failures(), setting_of(options, *SETTING)
    ranks = options.ranks
    small = f"{ranks} × {options.small}"
    runs = {
        small: [f"data.batch_size={options.small}"],
        f"{ranks} × {options.large}": [f"data.batch_size={options.large}"],
        "adaptive": [
            f"data.batch_size={options.small}", "policy=noise_batch",
            f"policy.noise_batch.most={ranks * options.most}", f"policy.noise_batch.least={ranks * options.small}",
            *options.policy,
        ],
    }  # fmt: skip
    rows = read_rows(folder / "batch_epochs.csv")
    for name in [name for place, name in enumerate(runs) if place in options.only]:
        with failures.noted(name):
            found = _measured(runs[name], options, folder / name.replace(" ", "").replace("×", "x"))
            rows = keep_rows(folder / "batch_epochs.csv", [{"setting": setting, "run": name, **row} for row in found])
    by_run = of_setting(rows, setting)
    if by_run:
        told = [{"setting": setting, **row} for row in numbers(by_run, small)]
        keep_rows(folder / "batch.csv", told)
        for row in told:
            print(
                f"{row['run']}: {row['accuracy']:.3f} in {row['seconds']:.0f} s and {row['steps']} steps; within a "
                f"point of {small}'s best after {row['to_target_s']:.0f} s, {row['share']:.2f} of its time there, "
                f"{row['share_of_all']:.2f} of its whole time"
            )
        lines = {
            name: ([row["seconds"] for row in found], [row["accuracy"] for row in found])
            for name, found in by_run.items()
        }
        draw_lines(folder / "batch.png", lines, x="seconds of training", y="validation accuracy")
    failures.end()


def numbers(by_run: dict[str, list[Row]], small: str) -> list[Row]:
    """A row for each run; nan where the small batch was not measured, infinite where its accuracy was not reached."""
    points = {name: [(row["seconds"], row["accuracy"]) for row in found] for name, found in by_run.items()}
    target = its_s = whole_s = float("nan")
    if small in points:
        target = max(accuracy for _, accuracy in points[small]) - POINT
        its_s, whole_s = series.first_reaching(points[small], target), points[small][-1][0]
    told = []
    for name, found in by_run.items():
        to_target_s = series.first_reaching(points[name], target) if small in points else float("nan")
        told.append(
            {
                "run": name,
                "accuracy": max(row["accuracy"] for row in found),
                "seconds": found[-1]["seconds"],
                "steps": found[-1]["steps"],
                "target": target,
                "to_target_s": to_target_s,
                "share": to_target_s / its_s,
                "share_of_all": to_target_s / whole_s,
            }
        )
    return told


def _measured(settings: list[str], options: argparse.Namespace, folder: Path) -> list[Row]:
    """Seconds of training, steps and accuracy by epoch."""
    lab = LabConfig(hosts=options.ranks, devices_per_host=1, between=LinkConfig(rate=options.rate))
    command = [
        "fit", "recipe=resnet56", "data=cifar10", f"data.root={Path(options.root).resolve()}",
        f"data.image_size={options.image_size}", "strategy=adaptive", "strategy.topology=ring",
        "strategy.adapt=false", f"trainer.max_epochs={options.epochs}", "recipe.lr_policy=constant",
        f"recipe.warmup_epochs={options.warmup_epochs}", f"recipe.lr={options.lr}", "callbacks=monitors",
        "callbacks.latencies=null",
        "callbacks.last=null", "callbacks.best=null", "callbacks.progress=null", "callbacks.noise_scale=null",
        "trainer.enable_model_summary=false", "trainer.num_sanity_val_steps=0", f"seed={options.seed}", *settings,
    ]  # fmt: skip
    run = trained_in(lab, command, folder)
    with (run / "metrics.csv").open() as file:
        accuracies = [(int(row["step"]), float(row["val_acc"])) for row in csv.DictReader(file) if row["val_acc"]]
    timed = steps(run)
    return [
        {
            "epoch": epoch,
            "seconds": sum(row["step_s"] for row in timed if row["step"] <= step),
            "steps": sum(row["step"] <= step for row in timed),
            "accuracy": accuracy,
        }
        for epoch, (step, accuracy) in enumerate(accuracies)
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--small", type=int, default=32)
    parser.add_argument("--large", type=int, default=1024)
    parser.add_argument("--most", type=int, default=256, help="Samples a rank to which the adaptive batch may grow.")
    parser.add_argument("--policy", nargs="*", default=["policy.noise_batch.every_steps=10"])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--image-size", type=int, default=16)
    parser.add_argument("--rate", default="50mbit")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument(
        "--warmup-epochs", type=float, default=1.0, help="As the recipe's; without, chance decides whether it learns."
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="+", default=[0, 1, 2], help="Of the runs: small, large, adaptive.")
    parser.add_argument("--out", default="outputs/adapt/batch")
    return parser.parse_args()


if __name__ == "__main__":
    main()
