"""Workers that are added while they are worth it: throughput by step, beside a run with all of them from the beginning.

    sudo -E .venv/bin/python benchmarks/adapt/provision.py

BERT on questions of SQuAD's form: the embedded thirty, over and over, so that an epoch is long enough. Every rank
writes step, workers and its samples a second (`run/ranks/rank0.csv`). A run that was stopped is begun again, one that
ended is not. `--runs` chooses one of the two. `--schedule 2:40,3:40,2:40` changes the number by steps instead, with
files of its own (`schedule.csv`, `schedule.png`); pauses are told, from the last step of so many workers to the first
of others.
"""

import argparse
import csv
import json
from collections import defaultdict
from pathlib import Path

from runs import Failures, Row, draw_lines, keep_rows, of_setting, read_rows, setting_of, trained
from series import worker_changes

from pl_pipe.recipes.language.squad_format import SAMPLE

PROVISIONED, ALL, SCHEDULE = "provisioned", "all workers", "by schedule"
SETTING = ("recipe", "settings", "cluster", "rate", "topology", "batch", "times", "steps", "interval", "schedule")


def main() -> None:
    options = _options()
    folder, failures, setting = Path(options.out), Failures(), setting_of(options, *SETTING)
    settings = list(options.settings)
    if options.recipe == "bert_squad":
        settings += repeated_questions(folder / "data", options.times)
    table = folder / ("provision.csv" if options.schedule is None else "schedule.csv")
    rows = read_rows(table)
    for name in options.runs if options.schedule is None else [SCHEDULE]:
        with failures.noted(name):
            found = [{"setting": setting, "run": name, **row} for row in _measured(name, settings, options, folder)]
            rows = keep_rows(table, found)
    by_run = of_setting(rows, setting)
    for name, found in by_run.items():
        _tell(name, found)
    if by_run:
        lines = {
            name: ([row["step"] for row in found], [row["samples_per_s"] for row in found])
            for name, found in by_run.items()
        }
        changing = next((found for name, found in by_run.items() if name != ALL), [])
        marks = {change["after_step"]: f"{change['workers']} workers" for change in worker_changes(changing)}
        draw_lines(table.with_suffix(".png"), lines, x="step", y="samples a second", marks=marks)
    failures.end()


def _measured(name: str, settings: list[str], options: argparse.Namespace, folder: Path) -> list[Row]:
    """Workers, samples a second of all, and the time of its end, by step."""
    place = folder / name.replace(" ", "_")
    run = place.resolve() / "run"
    command = [
        "lab", "run", f"cluster={options.cluster}", f"cluster.lab.between.rate={options.rate}", "--", "fit",
        f"recipe={options.recipe}", f"data.batch_size={options.batch}", "trainer.max_epochs=1",
        "trainer.limit_val_batches=0", f"trainer.max_steps={options.steps}", "strategy=adaptive",
        "strategy.adapt=false", f"strategy.topology={options.topology}", "callbacks=monitors",
        "callbacks.noise_scale=null", "callbacks.latencies=null", "callbacks.best=null", "callbacks.progress=null",
        "trainer.enable_model_summary=false", f"callbacks.step_time.folder={run / 'ranks'}",
        f"hydra.run.dir={run}", *settings,
    ]  # fmt: skip
    if name != ALL:
        command += ["policy=provision", f"policy.provision.interval={options.interval}",
                    f"policy.provision.window={options.interval // 2}"]  # fmt: skip
    if name == SCHEDULE:
        command += [f"policy.provision.schedule=[{options.schedule}]"]
    trained(command, place)
    by_step: dict[int, list[tuple[int, float]]] = defaultdict(list)
    ends_s: dict[int, float] = {}
    for file in sorted((run / "ranks").glob("rank*.csv")):
        with file.open() as opened:
            for row in csv.DictReader(opened):
                step = int(row["step"])
                by_step[step].append((int(row["workers"]), float(row["samples_per_s"])))
                ends_s[step] = max(ends_s.get(step, 0.0), float(row["ended_at_s"]))
    return [
        {
            "step": step,
            "workers": ranks[0][0],
            "samples_per_s": sum(rate for _, rate in ranks),
            "ended_at_s": ends_s[step],
        }
        for step, ranks in sorted(by_step.items())
    ]


def _tell(name: str, rows: list[Row]) -> None:
    """The changes, and how long nothing was trained; the step after a change has no time of its own."""
    print(f"{name}: {rows[0]['workers']} worker(s) at first")
    for change in worker_changes(rows):
        steps = f"{change['steps_included']} step(s) included"
        print(f"{name}: {change['workers']} after step {change['after_step']}, {change['pause_s']:.1f} s ({steps})")


def repeated_questions(folder: Path, times: int) -> list[str]:
    """A file of SQuAD's form with the embedded questions, each so many times; gives the settings to read it."""
    sample = json.loads(SAMPLE.read_text())
    vocabulary = SAMPLE.parent / "vocab.txt"
    articles = []
    for number in range(times):
        for article in json.loads(json.dumps(sample["data"])):
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    question["id"] = f"{question['id']}-{number}"
            articles.append(article)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train-v2.0.json").write_text(json.dumps({**sample, "data": articles}))
    (folder / "dev-v2.0.json").write_text(SAMPLE.read_text())
    return [f"data.root={folder.resolve()}", f"data.vocabulary={vocabulary}"]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="bert_squad")
    parser.add_argument("--settings", nargs="*", default=[], help="More settings of the run.")
    parser.add_argument("--cluster", default="lab_4x1_1gbit")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--topology", default="ring")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--times", type=int, default=1000, help="How often each question is there.")
    parser.add_argument("--steps", type=int, default=None, help="900, or those of the schedule.")
    parser.add_argument("--interval", type=int, default=150, help="Steps between decisions.")
    parser.add_argument("--schedule", default=None)
    parser.add_argument("--runs", nargs="+", default=[PROVISIONED, ALL], choices=[PROVISIONED, ALL])
    parser.add_argument("--out", default="outputs/adapt/provision")
    found = parser.parse_args()
    if found.steps is None:
        schedule = (found.schedule or "").split(",")
        found.steps = sum(int(part.partition(":")[2]) for part in schedule) if found.schedule else 900
    return found


if __name__ == "__main__":
    main()
