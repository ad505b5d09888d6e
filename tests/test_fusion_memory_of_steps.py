"""Steps whose tensors lie in memory that others see (gradients, the batch, views that do not say so), and types and
draws that nobody mentions: variants equal separate runs, or the formulation says that it cannot."""

from typing import Any, ClassVar

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pl_pipe.errors import FusionError
from pl_pipe.strategies import FusionStrategy
from pl_pipe.strategies.fusion.variant_memory import NotPutBackError
from pl_pipe.tensors.kept_tensor import KeptTensor
from pl_pipe.tensors.taken_memory import TakenMemory
from tests.fused_modules import trainer

RATES = (0.1, 0.03, 0.01)
CLIPPED = {"gradient_clip_val": 0.05}
FORMULATIONS = ["branches", "captured array", "array", "model array", "one by one", "auto"]


@torch.library.custom_op("pl_pipe_tests::unsaid_noise", mutates_args=())
def unsaid_noise(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


class Ignoring(torch.autograd.Function):
    """Its gradient is what it was given, whatever comes from behind."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, given: Tensor) -> Tensor:
        ctx.save_for_backward(given)
        return (weight * given).sum()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return ctx.saved_tensors[0], None


class Step(L.LightningModule):
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.weight, self.second = nn.Parameter(torch.randn(5, 8) * 0.1), nn.Parameter(torch.zeros(5, 8))
        self.bias = nn.Parameter(torch.zeros(8))
        self.norm = nn.BatchNorm1d(8)

    def outputs(self, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.outputs(x, y), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.hparams["lr"])


class OneGradientForTwo(Step):
    """autograd gives both the same tensor, which is clipped twice unless they are parted."""

    options = CLIPPED

    def outputs(self, x: Tensor, y: Tensor) -> Tensor:
        return F.linear(x, self.weight + self.second)


class GradientOfTheBatchAlone(Step):
    options = CLIPPED

    def outputs(self, x: Tensor, y: Tensor) -> Tensor:
        return F.linear(x, self.weight) + Ignoring.apply(self.bias, x.mean(0))  # type: ignore[no-any-return, no-untyped-call]


class GradientInTheBatch(Step):
    options = CLIPPED

    def outputs(self, x: Tensor, y: Tensor) -> Tensor:
        return F.linear(x, self.weight) + Ignoring.apply(self.bias, x[0])  # type: ignore[no-any-return, no-untyped-call]


class DefaultTypes(Step):
    """Double precision, as Lightning's plugin says it."""

    def outputs(self, x: Tensor, y: Tensor) -> Tensor:
        moved = x + (y / 3)[:, None] @ torch.ones(1, 8, dtype=x.dtype) + torch.linspace(0, 1, 8)
        return F.linear(moved, self.weight)


class DefaultTypesDrawn(Step):
    def outputs(self, x: Tensor, y: Tensor) -> Tensor:
        return F.linear(x + torch.rand(x.shape), self.weight)


class UnsaidDraws(Step):
    def outputs(self, x: Tensor, y: Tensor) -> Tensor:
        return F.linear(unsaid_noise(x), self.weight)


class UnsaidViews(Step):
    def outputs(self, x: Tensor, y: Tensor) -> Tensor:
        doubled = x * 2
        first, _ = torch.unsafe_chunk(doubled, 2, 1)
        first.add_(self.weight.detach()[0, :4])
        parts = torch.unsafe_split_with_sizes(doubled, [3, 5], 1)
        parts[1].mul_(self.weight.detach()[0, :1])
        return F.linear(doubled, self.weight + self.second)


class WritesData(Step):
    def outputs(self, x: Tensor, y: Tensor) -> Tensor:
        x.data.mul_(1.5)
        return F.linear(x, self.weight)


class ChangesShape(Step):
    def outputs(self, x: Tensor, y: Tensor) -> Tensor:
        x.unsqueeze_(1)
        return F.linear(F.dropout(self.norm(x.flatten(1)), 0.3), self.weight)


class AsksForStrides(Step):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [torch.cat([batch[0], batch[0]], 1)[:, ::2], batch[1]]

    def outputs(self, x: Tensor, y: Tensor) -> Tensor:
        return F.linear(x, self.weight) + torch.as_strided(x, (2, 8), (16, 2)).sum() * self.second.sum()


STEPS = [
    OneGradientForTwo, GradientOfTheBatchAlone, GradientInTheBatch, DefaultTypes, DefaultTypesDrawn, UnsaidDraws,
    UnsaidViews, WritesData, ChangesShape, AsksForStrides,
]  # fmt: skip
REFUSED = {
    DefaultTypesDrawn: ["captured array"],
    UnsaidDraws: ["captured array", "array"],
    UnsaidViews: ["captured array", "array"],
    WritesData: ["branches", "captured array", "model array"],
    ChangesShape: ["branches", "captured array", "model array"],
}
"""What says so; the others do it."""


def loader() -> Any:
    source = torch.Generator().manual_seed(0)
    x, y = torch.randn(26, 8, generator=source).double(), torch.randint(0, 5, (26,), generator=source)
    return DataLoader(TensorDataset(x, y), batch_size=4, generator=torch.Generator().manual_seed(1))


def fit(module: Step, **options: Any) -> L.Trainer:
    running = trainer(max_epochs=2, precision="64-true", **module.options, **options)
    running.fit(module, loader())
    return running


@pytest.mark.parametrize("formulation", FORMULATIONS)
@pytest.mark.parametrize("kind", STEPS)
def test_steps_equal_separate_runs_or_are_refused(kind: type[Step], formulation: str) -> None:
    L.seed_everything(1, verbose=False)
    fused = FusionStrategy({"lr": list(RATES)}, formulation=formulation)
    if formulation in REFUSED.get(kind, []):
        with pytest.raises(FusionError, match="formulation=auto"):
            fit(kind(), strategy=fused)
        return
    running = fit(kind(), strategy=fused)
    for number, lr in enumerate(RATES):
        L.seed_everything(1, verbose=False)
        alone = kind(lr)
        plain = fit(alone)
        theirs = fused.variants[number].state_dict()
        for name, value in alone.state_dict().items():
            assert (value - theirs[name]).abs().max() <= 1e-12, (number, name)
        said, expected = running.callback_metrics[f"loss/variant_{number}"], plain.callback_metrics["loss"]
        assert abs(said - expected) <= 1e-12


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.add_(1), lambda x: x.data.mul_(2), lambda x: x.unsqueeze_(0), lambda x: x.t_(),
        lambda x: x.set_(torch.ones(5)), lambda x: x.detach()[0].zero_(),
    ],
)  # fmt: skip
def test_a_kept_tensor_is_put_back(change: Any) -> None:
    whole = torch.arange(12.0).view(3, 4)
    whole[1, 1] = float("nan")
    tensor = whole[:, :3]
    before = tensor.clone()
    kept = KeptTensor(tensor)
    assert not kept.is_written()
    change(tensor)
    assert kept.is_written()
    kept.put_back()
    assert tensor.equal(before) or bool(((tensor == before) | before.isnan()).all())
    assert tensor.stride() == (4, 1)
    assert tensor.data_ptr() == whole.data_ptr()


def test_memory_is_taken_from_the_first_byte_to_the_last() -> None:
    whole = torch.zeros(4, 4)
    taken = TakenMemory([whole[0]])
    assert [taken.take(one) for one in (whole[1], whole[1, 2:], whole[0, :2], whole[2:], torch.zeros(0))] == [
        True, False, False, True, True,
    ]  # fmt: skip


def nested_batches(samples: list[Any]) -> Any:
    return torch.nested.nested_tensor([x for x, _ in samples]), torch.stack([y for _, y in samples])


class Nested(Step):
    def outputs(self, x: Tensor, y: Tensor) -> Tensor:
        return F.linear(x.to_padded_tensor(0.0), self.weight)


@pytest.mark.parametrize("formulation", ["branches", "one by one", "auto"])
def test_batches_that_lie_in_many_memories(formulation: str) -> None:
    data = DataLoader(loader().dataset, batch_size=13, collate_fn=nested_batches)
    fused = FusionStrategy({"lr": list(RATES)}, formulation=formulation)
    running = trainer(max_epochs=1, strategy=fused)
    L.seed_everything(1, verbose=False)
    if formulation == "branches":
        with pytest.raises(FusionError, match="nested"):
            running.fit(Nested().double(), data)
        return
    running.fit(Nested().double(), data)
    L.seed_everything(1, verbose=False)
    alone = Nested(RATES[1]).double()
    trainer(max_epochs=1).fit(alone, data)
    assert torch.allclose(alone.weight, fused.variants[1].weight, atol=1e-12)


def test_a_measuring_step_that_cannot_be_taken_back_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(_: Any) -> None:
        raise RuntimeError("out of reach")

    monkeypatch.setattr(KeptTensor, "put_back", cannot)
    with pytest.raises(NotPutBackError, match=r"out of reach.*max_array"):
        fit(WritesData(), strategy=FusionStrategy({"lr": list(RATES)}))
