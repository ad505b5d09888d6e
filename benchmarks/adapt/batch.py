"""Small, large and adaptive batches on ResNet-56 and CIFAR-10: accuracy and time. After KungFu's experiment.

    sudo -E .venv/bin/python benchmarks/adapt/batch.py --root FOLDER   # with train/<class>/ and test/<class>/

Four hosts with slow links, where a step's sum has its price: larger batches make fewer of them. Images are made
smaller, so that a processor gets through some epochs. Time is that of the epochs, without start and validation. Runs
that ended are not repeated.
"""

import argparse
import csv
from pathlib import Path

from runs import draw_lines, steps, trained_in, write_rows

from pl_pipe.cluster import LabConfig, LinkConfig


def main() -> None:
    options = _options()
    folder, rows, lines = Path(options.out), [], {}
    ranks = options.ranks
    runs = {
        f"{ranks} × {options.small}": [f"data.batch_size={options.small}"],
        f"{ranks} × {options.large}": [f"data.batch_size={options.large}"],
        "adaptive": [
            f"data.batch_size={options.small}", "policy=noise_batch",
            f"policy.noise_batch.most={ranks * options.most}", f"policy.noise_batch.least={ranks * options.small}",
            *options.policy,
        ],
    }  # fmt: skip
    for name in [name for place, name in enumerate(runs) if place in options.only]:
        lab = LabConfig(hosts=ranks, devices_per_host=1, between=LinkConfig(rate=options.rate))
        command = [
            "fit", "recipe=resnet56", "data=cifar10", f"data.root={Path(options.root).resolve()}",
            f"data.image_size={options.image_size}", "strategy=adaptive", "strategy.topology=ring",
            "strategy.adapt=false", f"trainer.max_epochs={options.epochs}", "recipe.lr_policy=constant",
            "recipe.warmup_epochs=0", f"recipe.lr={options.lr}", "callbacks=monitors", "callbacks.latencies=null",
            "callbacks.last=null", "callbacks.best=null", "callbacks.progress=null", "callbacks.noise_scale=null",
            "trainer.enable_model_summary=false", "trainer.num_sanity_val_steps=0", "seed=1", *runs[name],
        ]  # fmt: skip
        run = trained_in(lab, command, folder / name.replace(" ", "").replace("×", "x"), lambda *_: None)
        with (run / "metrics.csv").open() as file:
            accuracies = [(int(row["step"]), float(row["val_acc"])) for row in csv.DictReader(file) if row["val_acc"]]
        found = steps(run)
        seconds = [sum(row["step_s"] for row in found if row["step"] <= step) for step, _ in accuracies]
        best = max(accuracy for _, accuracy in accuracies)
        rows.append({"run": name, "accuracy": best, "seconds": seconds[-1], "steps": len(found)})
        lines[name] = (seconds, [accuracy for _, accuracy in accuracies])
        print(f"{name}: {best:.3f} in {seconds[-1]:.0f} s and {len(found)} steps", flush=True)
    write_rows(folder / "batch.csv", rows)
    draw_lines(folder / "batch.png", lines, x="seconds of training", y="validation accuracy")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--small", type=int, default=32)
    parser.add_argument("--large", type=int, default=1024)
    parser.add_argument("--most", type=int, default=256, help="Samples a rank to which the adaptive batch may grow.")
    parser.add_argument("--policy", nargs="*", default=["policy.noise_batch.every_steps=20"])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--image-size", type=int, default=16)
    parser.add_argument("--rate", default="50mbit")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--only", type=int, nargs="+", default=[0, 1, 2], help="Of the runs: small, large, adaptive.")
    parser.add_argument("--out", default="outputs/adapt/batch")
    return parser.parse_args()


if __name__ == "__main__":
    main()
