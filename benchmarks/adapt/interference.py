"""Other traffic on the star's centre: throughput by step, with and without adaptation. After KungFu's experiment.

    sudo -E .venv/bin/python benchmarks/adapt/interference.py

Four hosts and two spectators, which send to host0 from one step to another. The picture shows the drop, the switch, the
recovery and the way back; the last lines say how many steps each took.
"""

import argparse
import re
import statistics
from pathlib import Path

from runs import draw_lines, steps, trained_in, wait_for_step, write_rows

from pl_pipe.cluster import LabConfig, LinkConfig
from pl_pipe.lab import Lab


def main() -> None:
    options = _options()
    folder, lines, rows = Path(options.out), {}, []
    for adapt in (True, False):
        name = "adapting" if adapt else "not adapting"
        lab = LabConfig(hosts=4, devices_per_host=1, between=LinkConfig(rate=options.rate))
        lab.spectators = options.spectators
        command = [
            "fit", f"recipe={options.recipe}", "data=synthetic", f"data.batch_size={options.batch}",
            f"data.num_samples={4 * options.batch * options.steps}", "trainer.limit_val_batches=0",
            "strategy=adaptive", f"strategy.topology={options.topology}", f"strategy.adapt={str(adapt).lower()}",
            "+logger.csv.flush_logs_every_n_steps=1", "callbacks=monitors", "callbacks.noise_scale=null",
            "callbacks.latencies=null", "callbacks.last=null",
            "callbacks.best=null", "callbacks.progress=null", "trainer.enable_model_summary=false",
            "trainer.max_epochs=1", f"trainer.max_steps={options.steps}", *options.settings,
        ]  # fmt: skip

        def traffic(lab: Lab, run: Path) -> None:
            for step, rate in ((options.begin, options.traffic), (options.end, "0")):
                wait_for_step(run, step)
                for number in range(options.spectators):
                    lab.set_traffic(f"spectator{number}", options.target, rate)

        run = trained_in(lab, command, folder / name.replace(" ", "_"), traffic)
        found = steps(run)
        lines[name] = ([row["step"] for row in found], [row["samples_per_s"] for row in found])
        rows += [{"run": name, "step": row["step"], "samples_per_s": row["samples_per_s"]} for row in found]
        _tell(name, run, dict(zip(*lines[name], strict=True)), options)
    write_rows(folder / "interference.csv", rows)
    marks = {"traffic": options.begin, "no traffic": options.end}
    draw_lines(folder / "interference.png", lines, x="step", y="samples a second", marks=marks)


def _tell(name: str, run: Path, by_step: dict[int, float], options: argparse.Namespace) -> None:
    def mean(first: int, last: int) -> float:
        return statistics.median(value for step, value in by_step.items() if first <= step < last)

    third = (options.end - options.begin) // 3
    print(
        f"{name}: {mean(10, options.begin):.2f} samples/s before, {mean(options.end - 2 * third, options.end):.2f} "
        f"with traffic once settled, {mean(options.steps - 15, options.steps):.2f} at the end"
    )
    for line in (run / "fit.log").read_text().splitlines():
        if re.search(r"topology:|links are slow|as quick again", line):
            print(f"  {line}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="mobilenet_v2")
    parser.add_argument("--settings", nargs="*", default=["recipe.width=0.25"])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--traffic", default="80mbit")
    parser.add_argument("--spectators", type=int, default=2, help="Each sends over a connection of its own.")
    parser.add_argument("--target", default="host0")
    parser.add_argument("--topology", default="star")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--begin", type=int, default=40)
    parser.add_argument("--end", type=int, default=100)
    parser.add_argument("--out", default="outputs/adapt/interference")
    return parser.parse_args()


if __name__ == "__main__":
    main()
