"""What forwards do beside computing: other parameters, new buffers, counters, views, random numbers of all kinds."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pl_pipe.errors import FusionError
from pl_pipe.fusion import VariantArray
from pl_pipe.tensors.arrays import OwnStreams
from tests.fused_modules import loader
from tests.fusion_cases import assert_close, assert_equal_to_separate, built, common
from tests.test_fusion_fidelity import check
from tests.test_fusion_replay import STILL, Recorded


class Momentum(nn.Module):
    """Of MoCo: a key encoder that follows."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 3), nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, other in zip(self.query.parameters(), self.key.parameters(), strict=True):
                other.data = other.data * 0.9 + mine.data * 0.1
            self.seen.data = self.seen.data + self.key(x).mean(0)
        return self.query(x) - self.key(x).detach()  # type: ignore[no-any-return]


@pytest.mark.parametrize("fuse_except", [[], ["part"]])
def test_parameters_that_a_forward_gives_other_numbers(fuse_except: list[str]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Momentum()

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x)  # type: ignore[no-any-return]

    variants = built(Net)
    assert_equal_to_separate(
        variants, common(5, 4), common(2, 4, seed=6), common(5, 4, seed=7), fuse_except=fuse_except
    )


def test_another_parameter_in_ones_place_is_refused() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            out = x * self.weight
            self.weight = nn.Parameter(self.weight * 0.5)
            return out

    array = VariantArray(built(Net))
    before = [variant.weight for variant in array.variants]
    with pytest.raises(FusionError, match="another parameter in the place of weight"):
        array(common(5, 4))
    assert [variant.weight for variant in array.variants] == before


# ---- settings that differ


@dataclass(slots=True)
class Slotted:
    factor: float


class Set(nn.Module):
    def __init__(self, how: Callable[["Set"], Any]) -> None:
        super().__init__()
        self.layer, self.inner = nn.Linear(4, 4), Inner(how(self))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.layer(x))  # type: ignore[no-any-return]

    def halved(self, x: Tensor) -> Tensor:
        return x / 2

    def doubled(self, x: Tensor) -> Tensor:
        return x * 2


class Inner(nn.Module):
    def __init__(self, setting: Any) -> None:
        super().__init__()
        self.setting = setting

    def forward(self, x: Tensor) -> Tensor:
        setting = self.setting
        if callable(setting):
            return setting(x)  # type: ignore[no-any-return]
        if isinstance(setting, Slotted):
            return x * setting.factor
        if isinstance(setting, dict):
            return x * setting["mean"].to(x) * setting["scale"]
        return x * float(sum(np.asarray(list(setting) if isinstance(setting, set | deque) else setting).reshape(-1)))


SETTINGS: dict[str, list[Callable[[Set], Any]]] = {
    "functions of torch": [lambda _: torch.tanh, lambda _: torch.relu],
    "methods": [lambda one: one.halved, lambda one: one.doubled],
    "numbers of numpy": [lambda _: np.int64(1), lambda _: np.int64(3)],
    "arrays of numpy": [lambda _: np.ones(2), lambda _: np.ones(3)],
    "sets": [lambda _: {1, 2}, lambda _: {1, 4}],
    "deques": [lambda _: deque([1]), lambda _: deque([2])],
    "slots": [lambda _: Slotted(1.0), lambda _: Slotted(3.0)],
    "beside a tensor": [
        lambda _: {"mean": torch.ones(()), "scale": 0.1}, lambda _: {"mean": torch.ones(()), "scale": 0.2},
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", SETTINGS)
def test_settings_of_every_kind_that_differ_are_each_variants_own(kind: str) -> None:
    def make() -> list[nn.Module]:
        return [built(lambda how=how: Set(how), [seed])[0] for seed, how in enumerate(SETTINGS[kind])]  # type: ignore[misc]

    array = assert_equal_to_separate(make(), common(5, 4), separate=make())
    assert [entry.layer for entry in array.report.unfused] == ["inner"]


def test_a_teacher_that_is_no_part_of_the_model_is_each_variants_own() -> None:
    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.both = nn.Linear(4, 4), [nn.Linear(4, 4).double()]
            self.layers = [self.student]  # a part of the model, and nothing new

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x) - self.both[0](x)  # type: ignore[no-any-return]

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Student()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)  # type: ignore[no-any-return]

    def make() -> list[nn.Module]:
        return built(Whole)

    array = assert_equal_to_separate(make(), common(5, 4), separate=make())
    assert [entry.layer for entry in array.report.unfused] == ["inner"]
    with pytest.raises(FusionError, match="'both', which differs"):
        VariantArray(built(Student))(common(5, 4))


# ---- random numbers


def test_every_way_to_draw_is_known() -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            share = torch.distributions.Beta(torch.tensor(0.4), torch.tensor(0.4)).sample()
            out = share * self.layer(x)
            out = out + torch.distributions.Dirichlet(torch.ones(4)).sample()
            out = out + torch.distributions.Gamma(out.detach().abs() + 1, torch.ones(())).sample()
            out = F.rrelu(out, training=True, inplace=True)
            return F.fractional_max_pool2d(out[None, None], 2, output_size=2)[0, 0]  # type: ignore[no-any-return]

    variants, seeds = built(Draws), [3, 4, 5]
    array = VariantArray(variants, streams=OwnStreams.seeded(seeds))
    before = torch.get_rng_state()
    outs = [array(common(5, 4)) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before), "the process's own generator drew"
    for number, (seed, alone) in enumerate(zip(seeds, built(Draws), strict=True)):
        torch.manual_seed(seed)
        for out in outs:
            assert_close(out[number], alone(common(5, 4)), what=f"variant {number}")


def test_mixed_up_batches_equal_separate_runs() -> None:
    class MixUp(Recorded):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            share = torch.distributions.Beta(0.4, 0.4).sample().to(x)
            return F.cross_entropy(self(share * x + (1 - share) * x.roll(1, 0)), y)

    check(MixUp, [{"dropout": 0.2}, {"dropout": 0.2, "lr": 0.03}], "array")


def test_a_draw_that_nobody_knows_of_is_no_step_of_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unknown(Recorded):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            noise = torch.zeros_like(batch[0])
            with torch._C.DisableTorchFunction():  # as an extension would draw
                noise = noise + torch.randn(noise.shape, dtype=noise.dtype)
            return F.cross_entropy(self(batch[0] + 0.1 * noise), batch[1])

    fused = check(Unknown, STILL[:2], data=lambda: loader(seed=5))
    assert fused.fusion_facts is not None
    assert fused.fusion_facts.chosen["training_step"] != "array"  # but which of the others is quicker may differ


# ---- order, names, views


def test_reversed_tensors() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            state = torch.zeros_like(x[0])
            for h in reversed(self.layer(x)):
                state = 0.5 * state + h
            return state

    assert_equal_to_separate(built(Backwards), common(5, 2, 4))


def test_tensors_by_their_names() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(input=x)
            filled = torch.empty(4, dtype=x.dtype)
            nn.init.constant_(filled, 0.5)
            nn.init.constant_(h[0].clone(), 0.5)
            assert torch.numel(input=h) == h.numel()
            return self.dropout(input=h) * filled  # type: ignore[no-any-return]

    variants = built(Named)
    for variant in variants:
        variant.eval()
    assert_equal_to_separate(variants, common(5, 4))


def test_slopes_that_all_share_are_those_of_channels() -> None:
    class Sloped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.prelu(self.layer(x), torch.linspace(0.1, 0.4, 4, dtype=x.dtype))

    assert_equal_to_separate(built(Sloped), common(4, 4), common(3, 4))


@pytest.mark.parametrize("way", ["part", "relu", "detached"])
def test_writes_through_what_only_looks_like_a_view_are_refused(way: str) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.conv(x)
            if way == "part":
                h.view(-1)[:2].zero_()
            elif way == "relu":
                F.relu(h.view(-1), inplace=True)
            else:
                h.detach().view(-1).mul_(2)
            return h

    variants = built(Writes)
    try:
        assert_equal_to_separate(variants, common(2, 2, 5, 5))  # where it is a view after all
    except FusionError as error:
        assert "writes through `.view()`" in str(error)  # noqa: PT017


# ---- buffers


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("is_array", [True, False])
def test_a_buffer_that_a_forward_makes_is_each_variants_own(persistent: bool, is_array: bool) -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slopes = nn.Parameter(torch.randn(4))
            self.register_buffer("bias", None, persistent=persistent)

        def forward(self, x: Tensor) -> Tensor:
            if self.bias is None:
                places = torch.arange(4, dtype=x.dtype)
                made = places * self.slopes.detach() if is_array else places
                self.register_buffer("bias", made, persistent=persistent)
                self.register_buffer("other", made + 1)
            return x * self.slopes + self.bias + self.other

    variants = built(Biased)
    array = assert_equal_to_separate(variants, common(5, 4), common(2, 4))
    for variant, alone in zip(variants, built(Biased), strict=True):
        alone(common(5, 4))
        assert_close(variant.state_dict(), alone.state_dict())
        assert ("bias" in variant.state_dict()) == persistent
    array.renew()
    array.keep([0, 2])
    for variant in variants:
        variant.zero_grad()
    assert_equal_to_separate([variants[0], variants[2]], common(5, 4), array=array)


def test_counters_that_begin_alike_may_be_written() -> None:
    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 6)
            self.register_buffer("counts", torch.zeros(6, dtype=torch.long))
            self.register_buffer("mask", torch.ones(6, dtype=torch.bool))

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            self.counts += F.one_hot(h.argmax(1), 6).sum(0)
            return h * self.mask

    variants = built(Codebook)
    assert_equal_to_separate(variants, common(5, 4), common(3, 4), common(7, 4))
    assert variants[0].counts.tolist() != variants[1].counts.tolist()


@pytest.mark.parametrize("formulation", ["captured array", "branches"])
def test_counters_and_masks_in_replays(formulation: str) -> None:
    class Masked(Recorded):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.register_buffer("mask", torch.ones(8, dtype=torch.long))

        def on_train_epoch_start(self) -> None:
            self.mask[self.current_epoch] = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.cross_entropy(self(batch[0] * self.mask), batch[1])

    fused = check(Masked, STILL[:2], formulation)
    assert fused.fusion_facts is not None
    assert fused.fusion_facts.chosen["training_step"] == formulation


class Scaled(nn.Module):
    """Reads a number of its variant's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return h * (2.0 if h.sum().item() > 0 else 3.0)


def test_a_part_that_reads_numbers_is_named_for_what_helps() -> None:
    x = common((3, 4))
    with pytest.raises(
        FusionError, match=r"\(in 1\.0\): item reads .*; let that part run once.*fuse_except=\['1\.0'\]"
    ):
        VariantArray(built(lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(Scaled()))))(x)
    nested = built(lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(Scaled())))
    assert_equal_to_separate(nested, x, fuse_except=["1.0"])
    with pytest.raises(
        FusionError, match=r"test_fusion_unusual.py:\d+: item reads .*; move it into a module of its own"
    ):
        VariantArray(built(Scaled))(x)


class Helping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.Linear(4, 4)

    def help(self, x: Tensor) -> Tensor:
        h: Tensor = self.scaled(x)
        return h * h.sum().item()

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.scaled(x)
        return h[h > 0].sum()


class Asking(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.helping, self.way = Helping(), way

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = getattr(self.helping, self.way)(x)
        return out


def test_only_what_can_run_once_a_variant_is_named_for_it() -> None:
    """Calls of other methods than forward are no runs of a part."""
    x = common((3, 4))
    with pytest.raises(FusionError, match=r"\(in 0\): item reads .*fuse_except=\['0'\]"):
        VariantArray(built(lambda: nn.Sequential(Asking("help"))))(x)
    assert_equal_to_separate(built(lambda: nn.Sequential(Asking("help"))), x, fuse_except=["0"])
    with pytest.raises(FusionError, match=r"shapes .*let that part run once a variant: fuse_except=\['helping'\]"):
        VariantArray(built(lambda: Asking("forward")))(x)
    assert_equal_to_separate(built(lambda: Asking("__call__")), x, fuse_except=["helping"])
