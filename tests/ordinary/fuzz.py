"""Draws options for scripts of `scripts/`, and reports what fails without an error of ours in words. For people.

    python fuzz.py SEED DRAWS      a line a draw: what was drawn, and `ends`, `equal`, `refused`, `as alone` or FAULT
    python fuzz.py SEED DRAWS 17   the 17th alone

Where the arithmetic is the single process's, weights are compared with the plain run's under the same Trainer options.
"""

import os
import random
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ordinary.expected import NOT_YET, REFUSED, RUNS
from ordinary.runner import SCRIPTS, differences
from pipedream_farm import Farm, Job, Order

from pl_pipe import errors

TIMEOUT_S = 120.0
OURS = {name for name, kind in vars(errors).items() if isinstance(kind, type)} | {"PeerError"}
TRAINER: dict[str, list[Any]] = {
    "accumulate_grad_batches": [2, 3],
    "gradient_clip_val": [0.5],
    "gradient_clip_algorithm": ["value"],
    "precision": ["bf16-mixed", "64-true"],
    "limit_train_batches": [1, 3, 0.5],
    "limit_val_batches": [0, 1],
    "val_check_interval": [1, 2, 0.5],
    "check_val_every_n_epoch": [2],
    "max_steps": [1, 3],
    "max_epochs": [2],
    "num_sanity_val_steps": [0, -1],
    "overfit_batches": [2],
    "reload_dataloaders_every_n_epochs": [1],
    "enable_checkpointing": [False],
    "log_every_n_steps": [1],
    "fast_dev_run": [2],
    "detect_anomaly": [True],
    "inference_mode": [False],
}
PIPELINE: dict[str, list[Any]] = {
    "num_microbatches": [1, 1, 1, 2, 3, 4],
    "recompute": [True],
    "load_data": ["needed"],
    "wire_dtype": ["bf16", "fp16"],
    "vertical_sync": [True],
    "update": ["minibatch"],
}
FUSION: dict[str, list[Any]] = {
    "formulation": ["array", "model array", "one by one", "branches", "captured array"],
    "max_array": [1, 2],
    "layers": ["timed", "usual"],
    "seeds": [[1], [1, 2, 3], [1, 1]],
    "monitor": ["loss", "train_loss"],
}


class Draw:
    def __init__(self, seed: int, number: int, scripts: list[str]) -> None:
        self.chance = random.Random(f"{seed} {number}")
        self.script = self.chance.choice(scripts)
        self.strategy = self.chance.choice(["pipeline", "pipeline", "fusion"])
        self.ranks = self.chance.choice([1, 2, 2, 2, 2, 3, 3]) if self.strategy == "pipeline" else 1
        self.arguments = self._some(TRAINER, 0.12)
        self.options = self._some(FUSION, 0.3)
        if self.strategy == "pipeline":
            self.options = {
                "schedule": self.chance.choice(["1f1b", "1f1b", "gpipe", "pipedream", "pipedream_2bw"]),
                "plan": self.chance.choice(["straight", "straight", "auto", "split_points"]),
                **self._some(PIPELINE, 0.25),
            }
            others = ("num_microbatches",) if self.options["schedule"] == "pipedream" else ("vertical_sync", "update")
            for name in others:  # refused, always in the same words
                self.options.pop(name, None)

    def _some(self, choices: Mapping[str, list[Any]], share: float) -> dict[str, Any]:
        return {name: self.chance.choice(values) for name, values in choices.items() if self.chance.random() < share}

    def split(self, modules: list[str]) -> None:
        """Names of modules instead of a plan."""
        if self.options.get("plan") == "split_points":
            del self.options["plan"]
            stages = self.chance.randint(1, self.ranks)
            points = sorted(self.chance.sample(range(len(modules)), min(stages - 1, len(modules))))
            self.options["split_points"] = [modules[point] for point in points]
            if stages < self.ranks:
                self.options["replicas"] = [self.ranks - stages + 1] + [1] * (stages - 1)

    def order(self, strategy: str = "", **options: Any) -> Order:
        given = {} if strategy else {"options": self.options}
        return Order(
            "ordinary.runner.run",
            ranks=1 if strategy else self.ranks,
            timeout_s=TIMEOUT_S,
            script=self.script,
            strategy=strategy or self.strategy,
            **{"arguments": self.arguments, **given, **options},
        )

    @property
    def alone(self) -> str:
        """The run that this one is to be like."""
        return "one variant" if self.strategy == "fusion" else "plain"

    @property
    def is_equal(self) -> bool:
        """Whether weights are to be those of the run alone."""
        whole = self.options.get("schedule") in ("1f1b", "gpipe") and self.options.get("num_microbatches") == 1
        return (
            (self.strategy == "fusion" or whole)
            and "wire_dtype" not in self.options
            and self.arguments.get("precision") != "bf16-mixed"
            and self.script not in {*RUNS, *REFUSED, "bf16_mixed"}
        )


def verdict(farm: Farm, draw: Draw) -> str:
    plain = farm.start(draw.order("plain", arguments={}))
    draw.split(modules(plain))
    job = farm.start(draw.order())
    found = [told(job, rank) for rank in range(draw.ranks)]
    failed = [one for one in found if "error" in one]
    if not failed:
        if not draw.is_equal:
            return "ends"
        (single,) = results(farm.start(draw.order(draw.alone)))
        if "error" in single:
            return f"ends, but alone {single['error'][:100]}"
        lines = list(differences(found[0]["weights"], single["weights"], tolerance=1e-4))
        return f"FAULT {len(lines)} other numbers: {lines[:2]} [{job.folder}]" if lines else "equal"
    own = [one for one in failed if one["error"].partition(":")[0] != "PeerError"] or failed
    texts = [one["error"] for one in own]
    known = REFUSED.get(draw.script, {}).values()
    if all(is_refusal(text) or any(re.search(words, text) for words in known) for text in texts):
        return f"refused: {texts[0][:200]}"
    (single,) = results(farm.start(draw.order(draw.alone)))
    if single.get("error", "").partition(":")[0] in {text.partition(":")[0] for text in texts}:
        return f"as alone: {texts[0][:100]}"
    return f"FAULT {texts[0][:400]} [{job.folder}]"


def is_refusal(text: str) -> bool:
    hangs = "have waited for each other" in text or "did not come within" in text
    return text.partition(":")[0] in OURS and not hangs


def results(job: Job) -> list[dict[str, Any]]:
    return [told(job, rank) for rank in range(job.ranks)]


def told(job: Job, rank: int) -> dict[str, Any]:
    try:
        return job.results[rank]
    except AssertionError as error:
        return {"error": f"NoResult: {error}"}


def modules(plain: Job) -> list[str]:
    """Names of modules with parameters of the script's model, in order."""
    (found,) = results(plain)
    names = [key.split(".", 1)[1].rpartition(".")[0] for key in found.get("weights", {})]
    return [name for name in dict.fromkeys(names) if name]


def main() -> None:
    seed, draws = int(sys.argv[1]), int(sys.argv[2])
    chosen = [int(sys.argv[3])] if sys.argv[3:] else range(draws)
    scripts = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem not in NOT_YET)
    farm = Farm(Path(tempfile.mkdtemp()))
    for number in chosen:
        draw = Draw(seed, number, scripts)
        said = verdict(farm, draw)
        given = f"{draw.strategy}:{draw.ranks} {draw.options} {draw.arguments}"
        sys.stdout.write(f"{number} {draw.script} {given}\n    {said}\n")
        sys.stdout.flush()
    farm.close()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
