"""Random scripts for a pipeline, each from a seed: the schedule, its plan, Lightning's options, stops and meetings."""

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

from late_rule import SYNCHRONOUS, Rule
from pipedream_farm import Order

PLANS = (
    *((1, 1), (1, 1, 1), (1, 1, 1, 1)),
    *((2,), (3,), (4,)),
    *((2, 1), (1, 2), (3, 1), (1, 3), (2, 2)),
    *((2, 1, 1), (1, 2, 1), (1, 1, 2)),
)
LATE = ("pipedream", "pipedream_2bw")
MODELS = ("Mlp", "Mlp", "Logs", "Keeps", "Groups", "Frozen", "CalledMetric", "Collected", "MadeLate")


@dataclass(frozen=True)
class Resumption:
    """Another plan goes on from a checkpoint of the first."""

    at: int
    """Which of the checkpoints, counted around."""
    order: Order


class Case(NamedTuple):
    single: Order
    """The same script in one process; nothing stops it where the pipeline stops at another batch, or by the clock."""
    pipeline: Order
    kept: Order | None
    """The pipeline that keeps its activations, where the other computes them again."""
    stop: tuple[str, dict[str, Any]] | None
    """A callback and its options."""
    resumption: Resumption | None

    @property
    def rule(self) -> Rule:
        return Rule.of(self.pipeline)

    @property
    def decides(self) -> bool:
        """By its own metrics, which are not a single run's."""
        names = [name for name, _ in self.single.options["callbacks"]]
        return self.single.options["scheduler"] == "plateau" or "EarlyStopping" in names

    @property
    def name(self) -> str:
        rule = self.rule
        return f"{rule.schedule}-{'-'.join(map(str, rule.replicas))}"


def refusal(order: Order) -> str | None:
    """The remedy with which a script has to be refused, if it has to be."""
    rule = Rule.of(order)
    if rule.update == "minibatch" and rule.vertical_sync:
        return "set update=round"
    if rule.is_late and any(name == "GradientAccumulationScheduler" for name, _ in order.options["callbacks"]):
        return "set accumulate_grad_batches for the whole run"
    if rule.schedule != "pipedream" and rule.microbatches < rule.fewest_microbatches:
        return f"set num_microbatches={rule.fewest_microbatches}"
    return None


def drawn(seed: int) -> Case:
    chance = random.Random(seed)
    schedule = chance.choice(("pipedream", "pipedream", "pipedream_2bw", "1f1b", "gpipe"))
    late, resumes = schedule in LATE, chance.random() < 0.35
    stop = None if resumes else _stop(chance)
    options = _script(chance, resumes=resumes, timed=stop is not None and stop[0] == "Slow")
    options["seed"] = seed
    options["model"] = "Mlp" if late or resumes else chance.choice(MODELS)
    if options["model"] == "CalledMetric" and options["scheduler"] == "plateau":  # it logs no val_loss
        options["scheduler"] = None
    callbacks = options["callbacks"] = _callbacks(chance, options, resumes=resumes, stops=stop is not None)
    single = Order("lightning_task.script", **options)
    other = chance.choice(LATE if late else SYNCHRONOUS)
    pipeline, resumed = (_over(chance, single, name) for name in (schedule, other))
    if stop is not None:
        stopped = {"callbacks": [*callbacks, list(stop)]}
        if stop[0] == "Slow":
            stopped["trainer"] = {**options["trainer"], "max_time": chance.choice((0.05, 0.15, 0.3))}
        pipeline = pipeline.over(pipeline.ranks, **stopped)
        if not late and stop[0] != "Slow":
            single = single.over(1, **stopped)
    kept = None
    if pipeline.options["strategy"].get("recompute"):
        kept = pipeline.over(pipeline.ranks, strategy={**pipeline.options["strategy"], "recompute": False})
    return Case(single, pipeline, kept, stop, Resumption(chance.randint(0, 9), resumed) if resumes else None)


def _script(chance: random.Random, *, resumes: bool, timed: bool) -> dict[str, Any]:
    """Lightning's side."""
    samples, batch_size = chance.randint(11, 34), chance.randint(3, 6)
    trainer: dict[str, Any] = {"max_epochs": chance.randint(1, 3)}
    batches = -(-samples // batch_size)
    if not resumes and chance.random() < 0.3:
        batches = trainer["limit_train_batches"] = chance.randint(2, batches)
    validates = not resumes and chance.random() < 0.6
    if validates:
        trainer["num_sanity_val_steps"] = chance.choice((0, 2))
        trainer["val_check_interval"] = chance.choice((1.0, 0.5, chance.randint(1, batches)))
        trainer["limit_val_batches"] = chance.choice((1.0, 1))
    if chance.random() < 0.3:
        trainer["max_steps"] = chance.randint(2, batches * trainer["max_epochs"])
    if chance.random() < 0.4:
        algorithm, limit = chance.choice((("norm", 0.3), ("value", 0.05)))
        trainer |= {"gradient_clip_val": limit, "gradient_clip_algorithm": algorithm}
    if chance.random() < 0.3:
        trainer["accumulate_grad_batches"] = chance.randint(2, 3)
    if chance.random() < 0.1:
        trainer["precision"] = "64-true"
    return {
        "data": "resumable" if resumes else "loader",
        "optimizer": chance.choice(("momentum", "adamw")),
        "scheduler": chance.choice((None, "step", "epoch", *(("plateau",) if validates and not timed else ()))),
        "data_options": {"samples": samples, "batch_size": batch_size},
        "shuffle": not resumes and chance.random() < 0.5,
        "validation": "loader" if validates else None,
        "trainer": trainer,
    }


def _callbacks(chance: random.Random, options: dict[str, Any], *, resumes: bool, stops: bool) -> list[list[Any]]:
    found: list[list[Any]] = []
    if resumes or chance.random() < 0.3:
        found.append(["ModelCheckpoint", {"every_n_train_steps": chance.randint(1, 7), "save_top_k": -1}])
    if chance.random() < 0.4:
        how = chance.choice(("broadcast", "decide", "barrier"))
        found.append(["Meets", {"every": chance.randint(1, 3), "how": how}])
    if chance.random() < 0.15:
        found.append(["SavesByHand", {"step": chance.randint(1, 5)}])
    if options["validation"] and not stops and options["model"] != "CalledMetric" and chance.random() < 0.2:
        found.append(["EarlyStopping", {"monitor": "val_loss", "patience": chance.randint(0, 1), "strict": False}])
    if not resumes and "accumulate_grad_batches" not in options["trainer"] and chance.random() < 0.05:
        found.append(["GradientAccumulationScheduler", {"scheduling": {"0": 1, "1": 2}}])
    return found


def _stop(chance: random.Random) -> tuple[str, dict[str, Any]] | None:
    """By a callback, on rank 0, on all ranks or on one that nobody asks; or by the clock."""
    luck = chance.random()
    if luck < 0.1:
        return "Slow", {"seconds": 0.02}
    if luck < 0.3:
        hook = chance.choice(("on_train_batch_end", "on_train_batch_end", "on_train_batch_start"))
        return "StopsAt", {"step": chance.randint(1, 9), "rank": chance.choice((0, 0, None, 1)), "hook": hook}
    return None


def _over(chance: random.Random, single: Order, schedule: str) -> Order:
    """The pipeline's side."""
    plan = chance.choice(PLANS)
    strategy: dict[str, Any] = {"schedule": schedule, "replicas": list(plan)}
    if schedule == "pipedream":
        if chance.random() < 0.4:
            strategy["update"] = "minibatch"
        if chance.random() < 0.2:
            strategy["vertical_sync"] = True
    elif chance.random() < 0.6:
        strategy["num_microbatches"] = chance.randint(1, 6)
    if chance.random() < 0.2:
        strategy["recompute"] = True
    if single.options["model"] == "MadeLate":  # which has no layers to name before it trains
        del strategy["replicas"]
        return single.over(min(len(plan) + 1, 4), strategy=strategy)
    return single.over(sum(plan), strategy=strategy, split=True)
