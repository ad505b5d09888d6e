"""What the variants' steps compute of the batch alone is computed once, with the numbers of separate runs."""

import operator
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from pl_pipe.fusion.replay import Divided, divided, trace
from pl_pipe.strategies import FusionStrategy
from pl_pipe.strategies.fusion import replayed_inputs
from pl_pipe.strategies.fusion.replayed_steps import ReplayedSteps
from pl_pipe.strategies.fusion.shared_part import SharedPart
from tests.fused_modules import difference, loader, trainer
from tests.test_fusion_replay import DROPPING, STILL, Recorded

Step = Callable[[Tensor, Tensor, Tensor, Tensor], list[Tensor]]


def arguments() -> list[Tensor]:
    """A weight, samples, labels, and what gradients are multiples of."""
    torch.manual_seed(1)
    return [torch.randn(6, 4).double(), torch.randn(5, 6), torch.randint(0, 4, (5,)), torch.tensor(2.0).double()]


def recorded(step: Step) -> tuple[fx.GraphModule, Divided | None]:
    weight, x, y, scale = arguments()
    traced = trace(lambda: step(weight, x, y, scale), state=[weight], inputs=[x, y, scale])
    return traced.graph, divided(traced.graph, range(1, 3))


def operations(graph: fx.GraphModule) -> list[str]:
    return [
        str(node.target).split(".")[1]
        for node in graph.graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem
    ]


def prepares(weight: Tensor, x: Tensor, y: Tensor, scale: Tensor) -> list[Tensor]:
    wide = (x - 0.5).double()
    target = (y[:, None] == torch.arange(4)).double()
    loss = (wide @ weight - target).square().mean()
    return [wide.T @ (wide @ weight - target) * scale, loss, target.sum()]


def several(weight: Tensor, x: Tensor, y: Tensor, scale: Tensor) -> list[Tensor]:
    largest, place = x.double().max(dim=1)
    halves = torch.cat([x, -x], 1).double().chunk(2, 1)
    return [(halves[0] @ weight).T @ (halves[1] @ weight) * scale, weight.sum() * largest.sum(), place.sum() + y]


def writes_late(weight: Tensor, x: Tensor, y: Tensor, scale: Tensor) -> list[Tensor]:
    """To a view of what was made of the batch; and through the view, not said to be one, by which a reshape ends."""
    wide = x.double()
    wide[0] += weight[:, 0]
    turned = x.double().T.reshape(5, 6)
    turned.mul_(scale)
    return [wide @ weight, turned @ weight, y + 1]


def draws(weight: Tensor, x: Tensor, y: Tensor, scale: Tensor) -> list[Tensor]:
    wide = x.double()
    return [F.dropout(wide, 0.5) @ weight * scale, torch.bernoulli(wide.sigmoid()) @ weight, y + 1]


def views(weight: Tensor, x: Tensor, y: Tensor, scale: Tensor) -> list[Tensor]:
    return [x.T[:, :2].T.double().mul_(2) @ weight * scale, y.view(-1, 1)]


@pytest.mark.parametrize(("step", "count"), [(prepares, 5), (several, 8), (draws, 3), (writes_late, 2)])
def test_a_divided_step_gives_the_same(step: Step, count: int) -> None:
    graph, found = recorded(step)
    assert found is not None
    assert found.count == count, found.once.code
    weight, x, y, scale = arguments()
    torch.manual_seed(3)
    expected = graph(weight, x, y, scale)
    once = found.once(x, y)
    kept = [one.clone() for one in once]
    for _ in range(2):  # variants: nobody changes what the next one needs
        torch.manual_seed(3)
        results = found.each(weight, x, y, *once, scale)
        for one, other in zip(results, expected, strict=True):
            assert torch.equal(one, other)
    assert all(map(torch.equal, once, kept))


def test_what_is_written_to_and_what_is_drawn_is_each_ones() -> None:
    _, found = recorded(writes_late)
    assert found is not None
    assert operations(found.once) == ["_to_copy", "add"]  # the reshape copies it once more
    assert {"_to_copy", "clone", "add_", "mul_"} <= set(operations(found.each))
    _, found = recorded(draws)
    assert found is not None
    assert operations(found.once) == ["_to_copy", "sigmoid", "add"]


def test_views_alone_are_not_worth_it() -> None:
    assert recorded(views)[1] is None


class Prepares(Recorded):
    """Of the batch alone: samples are scaled, and labels are smoothed by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x = (x - x.mean()) / (x.std() + 1)
        target = (y[:, None] == torch.arange(10, device=y.device)).to(x.dtype) * 0.9 + 0.01
        logits = self(x)
        loss = -(target * logits.log_softmax(1)).sum(1).mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("norm", x.square().mean(), on_step=False, on_epoch=True)
        return loss


def fitted(variants: Any, formulation: str, options: Any = None) -> tuple[FusionStrategy, L.Trainer, list[Any]]:
    shared: list[Any] = []

    class Looks(L.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            chosen = trainer.strategy.training._trials["training_step"].chosen
            assert isinstance(chosen, ReplayedSteps)
            shared.append(chosen._shared)

    L.seed_everything(1, verbose=False)
    fused = FusionStrategy(variants, formulation=formulation)
    running = trainer(strategy=fused, callbacks=[Looks()], **(options or {}))
    running.fit(Prepares(), loader("perceptron"), loader("perceptron", shuffle=False))
    return fused, running, shared


def check_equal(fused: FusionStrategy, running: L.Trainer, variants: Any, options: Any = None) -> None:
    for number, variant in enumerate(variants):
        L.seed_everything(1, verbose=False)
        alone, plain = Prepares(**variant), trainer(**(options or {}))
        plain.fit(alone, loader("perceptron"), loader("perceptron", shuffle=False))
        assert difference(alone, fused.variants[number]) <= 1e-9, number
        for name, value in plain.callback_metrics.items():
            assert abs(running.callback_metrics[f"{name}/variant_{number}"] - value) <= 1e-9, name


@pytest.mark.parametrize("formulation", ["branches", pytest.param("compiled branches", marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.2}])
def test_branches_share_what_they_compute_of_the_batch(formulation: str, options: Any) -> None:
    fused, running, shared = fitted(STILL, formulation, options)
    assert isinstance(shared[0], SharedPart)
    assert shared[0].operations > 5
    check_equal(fused, running, STILL, options)


def test_each_computes_for_itself_where_steps_differ() -> None:
    """Dropout of other probabilities are other operations."""
    fused, running, shared = fitted(DROPPING[:2], "branches")
    assert shared == [None]
    check_equal(fused, running, DROPPING[:2])


def test_one_variant_shares_with_nobody() -> None:
    assert fitted(STILL[:1], "branches")[2] == [None]


def test_large_tensors_are_copied_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayed_inputs, "_LARGE", 100)
    given = [torch.randn(50), torch.randn(3), torch.arange(4), torch.randn(2, 2).T]
    kept = [torch.zeros_like(one) for one in given]
    replayed_inputs.copy_at_once(list(zip(kept, given, strict=True)))
    assert all(map(torch.equal, kept, given))
