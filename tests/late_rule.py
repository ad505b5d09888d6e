"""A pipeline with delay, written out in one process: the reference of `pipedream`, replicas included, and its 2BW.

             drained        drained        in a segment, batch k meets on a stage the weights after so many updates
batches  0 1 2 3 │ 4 5 6 7 8 │ …             pipedream       max(0, r * (k // r - w) // every)
         └segment┘ └ segment ┘               vertical sync   max(0, k - w0 * r0) // every
                                             pipedream_2bw   max(0, k // every - 1)

r are the stage's replicas, w its warm-up, every the batches that share an update; w0 and r0 are the first stage's. What
a segment's end leaves of an update's batches makes one too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from pipedream_farm import Order
from pipedream_models import OPTIMIZERS, make
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

STAGE_OF_LAYER = {1: (0, 0, 0, 0), 2: (0, 0, 1, 1), 3: (0, 1, 1, 2), 4: (0, 1, 2, 3)}
"""As pipedream_tasks.SPLITS cuts an Mlp's layers."""
SYNCHRONOUS = ("1f1b", "gpipe")


@dataclass(frozen=True)
class Rule:
    """What a strategy's options mean, worked out apart from the package."""

    schedule: str
    replicas: tuple[int, ...]
    accumulate: int = 1
    update: str = "round"
    vertical_sync: bool = False
    num_microbatches: int | None = None

    @classmethod
    def of(cls, order: Order) -> "Rule":
        strategy = order.options["strategy"]
        named = {name: strategy[name] for name in ("update", "vertical_sync", "num_microbatches") if name in strategy}
        return cls(
            schedule=strategy["schedule"],
            replicas=tuple(strategy.get("replicas", (1,) * order.ranks)),
            accumulate=order.options.get("trainer", {}).get("accumulate_grad_batches", 1),
            **named,
        )

    @property
    def is_late(self) -> bool:
        return self.schedule not in SYNCHRONOUS

    @property
    def microbatches(self) -> int:
        """Of a batch."""
        if self.schedule == "pipedream":
            return 1
        return self.num_microbatches or math.lcm(*self.replicas) * len(self.replicas)

    @property
    def fewest_microbatches(self) -> int:
        """No replica may be left out; and 2BW has but two versions."""
        in_flight = self.warmup(0) * self.replicas[0] if self.schedule == "pipedream_2bw" else 0
        return max(*self.replicas, in_flight, 1)

    @property
    def lag(self) -> int:
        """Batches that some rank may have begun beyond the one that rank 0 is at."""
        if not self.is_late:
            return 0
        ahead = max((self.warmup(stage) + 1) * count - 1 for stage, count in enumerate(self.replicas))
        return -(-ahead // self.microbatches)

    def warmup(self, stage: int) -> int:
        following = sum(self.replicas[stage:]) - 1
        return following // self.replicas[stage]

    def averaged(self, stage: int) -> int:
        if self.schedule != "pipedream":
            return 1
        return math.lcm(*self.replicas) if self.update == "round" else self.replicas[stage]

    def every(self, stage: int) -> int:
        return self.averaged(stage) * self.accumulate

    def version(self, stage: int, batch: int) -> int:
        """How many updates of its segment the stage has made when it meets the batch."""
        count, every = self.replicas[stage], self.every(stage)
        if self.schedule == "pipedream_2bw":
            return max(0, batch // every - 1)
        if self.vertical_sync:
            return max(0, batch - self.warmup(0) * self.replicas[0]) // every
        return max(0, count * (batch // count - self.warmup(stage)) // every)

    def updates(self, stage: int, segments: Sequence[int], batches: int) -> int:
        """How many a stage makes in all."""
        return sum(-(-(end - begin) // self.every(stage)) for begin, end in pairwise([*segments, batches]))


def late_run(
    found: Mapping[str, Any], order: Order, start: Mapping[str, Any] | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, as Lightning shows them, and final weights of an Mlp.

    Of what a rank has noted it takes the batches, the learning rates they met, and before which of them the pipeline
    was drained; `start` is a checkpoint's content.
    """
    options, rule = order.options, Rule.of(order)
    model = make("Mlp", seed=options.get("seed", 0))
    if options.get("trainer", {}).get("precision") == "64-true":
        model.double()
    if start is not None:
        model.load_state_dict(start["state_dict"], strict=False)
    stages = _stages(model, rule, options, start)
    losses: list[float] = []
    for begin, end in pairwise([*found["segments"], len(found["batches"])]):
        for stage in stages:
            stage.begin()
        for k in range(end - begin):
            x, y = found["batches"][begin + k]
            used = {name: leaf for stage in stages for name, leaf in stage.met(k).items()}
            loss = F.cross_entropy(functional_call(model, used, (x,)), y) / rule.accumulate
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
            for stage in stages:
                stage.came({name: used[name].grad for name in stage.own}, found["first_rates"][begin + k])
                if (k + 1) % stage.every == 0 or begin + k + 1 == end:
                    stage.apply()
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


class _Stage:
    """The weights of one stage through a segment."""

    def __init__(self, rule: Rule, index: int, own: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self.own, self.every = own, rule.every(index)
        self.optimizer = OPTIMIZERS[options.get("optimizer", "momentum")](own.values())
        self._rule, self._index, self._trainer = rule, index, options.get("trainer", {})

    def begin(self) -> None:
        self._history = [self._weights()]
        self._waiting: list[tuple[Mapping[str, Tensor], float]] = []

    def met(self, batch: int) -> dict[str, Tensor]:
        """The leaves that a batch runs with."""
        version = self._history[self._rule.version(self._index, batch)]
        return {name: value.clone().requires_grad_() for name, value in version.items()}

    def came(self, gradients: Mapping[str, Tensor], rate: float) -> None:
        self._waiting.append((gradients, rate))

    def apply(self) -> None:
        mean = min(self._rule.averaged(self._index), len(self._waiting))
        for name, parameter in self.own.items():
            parameter.grad = sum(gradients[name] for gradients, _ in self._waiting) / mean
        self._clip()
        self.optimizer.param_groups[0]["lr"] = self._waiting[0][1]
        self.optimizer.step()
        self._history.append(self._weights())
        self._waiting = []

    def _weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.own.items()}

    def _clip(self) -> None:
        limit = self._trainer.get("gradient_clip_val")
        if limit is None:
            return
        if self._trainer.get("gradient_clip_algorithm") == "value":
            torch.nn.utils.clip_grad_value_(self.own.values(), limit)
        else:
            torch.nn.utils.clip_grad_norm_(list(self.own.values()), limit)


def _stages(
    model: torch.nn.Module, rule: Rule, options: Mapping[str, Any], start: Mapping[str, Any] | None
) -> list[_Stage]:
    named = dict(model.named_parameters())
    found = []
    for index in range(len(rule.replicas)):
        layers = STAGE_OF_LAYER[len(rule.replicas)]
        own = {name: p for name, p in named.items() if layers[int(name.split(".")[1])] == index}
        found.append(_Stage(rule, index, own, options))
        if start is not None:
            found[-1].optimizer.load_state_dict(_part(start["optimizer_states"][0], list(named), list(own)))
    return found


def _part(state: Mapping[str, Any], names: Sequence[str], own: Sequence[str]) -> dict[str, Any]:
    """Of a whole optimizer's state, these parameters'; an optimizer numbers them in the model's order."""
    kept = {own.index(names[number]): value for number, value in state["state"].items() if names[number] in own}
    return {"state": kept, "param_groups": [{**state["param_groups"][0], "params": list(range(len(own)))}]}
