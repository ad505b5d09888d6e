"""Stacked state, partial fusion, what variants may differ in, and what is refused."""

import copy
import functools
import gc
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from pl_pipe.errors import ConfigError, FusionError
from pl_pipe.fusion import Site, Usual, VariantArray
from tests.fusion_cases import assert_close, assert_equal_to_separate, assert_state_close, built, common, own
from tests.fusion_models import Residual

IMAGES = (4, 3, 8, 8)


def test_modules_see_views_of_stacked_tensors() -> None:
    variants = built(Residual)
    values = copy.deepcopy([variant.state_dict() for variant in variants])
    kept = list(variants[1].parameters())
    VariantArray(variants)
    for (name, first), (_, second) in zip(*(variant.named_parameters() for variant in variants[:2]), strict=True):
        assert second.data_ptr() == first.data_ptr() + first.numel() * first.element_size(), name
    assert [id(one) for one in variants[1].parameters()] == [id(one) for one in kept]  # what an optimizer may hold
    for variant, value in zip(variants, values, strict=True):
        assert_close(dict(variant.state_dict()), dict(value))


def test_gradients_are_views_and_follow_what_optimizers_do_to_them() -> None:
    variants = built(Residual)
    array = VariantArray(variants)

    def backward() -> None:
        torch.stack([out.square().mean() for out in array(common(*IMAGES))]).sum().backward()

    backward()
    weights = [variant.stem.weight for variant in variants]
    once = [weight.grad.clone() for weight in weights]
    assert weights[1].grad.data_ptr() == weights[0].grad.data_ptr() + weights[0].numel() * 8
    backward()  # accumulates
    variants[1].zero_grad()  # to None: begins anew
    weights[2].grad = once[2] * 10  # somebody's own
    backward()
    torch.testing.assert_close(weights[0].grad, once[0] * 3)
    torch.testing.assert_close(weights[1].grad, once[1])
    torch.testing.assert_close(weights[2].grad, once[2] * 11)
    for variant in variants:
        variant.zero_grad(set_to_none=False)
    backward()
    torch.testing.assert_close(weights[0].grad, once[0])


def test_unused_and_frozen_parameters_get_no_gradient() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.frozen, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(self.used(x))  # type: ignore[no-any-return]

    variants = built(Partly)
    array = VariantArray(variants)
    for variant in variants:
        variant.frozen.requires_grad_(False)
    variants[1].used.bias.requires_grad_(False)
    assert_equal_to_separate(variants, common(3, 4), array=array)
    for variant in variants:
        variant.frozen.requires_grad_(True)
        variant.zero_grad()
    assert_equal_to_separate(variants, common(3, 4), array=array)


def test_loaded_replaced_and_moved_state_is_taken_over() -> None:
    variants = built(Residual)
    array = VariantArray(variants)
    array(common(*IMAGES))
    other = built(Residual, seeds=[7])[0]
    variants[0].load_state_dict(other.state_dict())
    variants[1].load_state_dict(other.state_dict(), assign=True)
    variants[2].stem.weight = nn.Parameter(other.stem.weight.detach().clone() * 2)
    variants[2].norm.running_mean = torch.full((8,), 0.5, dtype=torch.float64)
    assert_equal_to_separate(variants, common(*IMAGES), array=array)
    for variant in variants:
        variant.float()
        variant.zero_grad()
    assert_equal_to_separate(variants, common(*IMAGES).float(), array=array, tolerance=1e-4)
    variants[1].double()
    with pytest.raises(FusionError, match=r"scale is .*float64.* in variant 1"):
        array(common(*IMAGES))


def test_variants_leave_and_the_rest_goes_on_as_if_alone() -> None:
    variants = built(Residual, seeds=[0, 1, 2, 3])
    separate = copy.deepcopy(variants)
    array = VariantArray(variants)
    optimizers = [SGD(variant.parameters(), lr=0.05 * (j + 1), momentum=0.9) for j, variant in enumerate(variants)]
    others = [SGD(variant.parameters(), lr=0.05 * (j + 1), momentum=0.9) for j, variant in enumerate(separate)]
    members = [0, 1, 2, 3]
    for step, leaving in enumerate([None, 1, None, 3, None]):
        if leaving is not None:
            stacked = weakref.ref(array._stacked[0].tensor)
            position = members.index(leaving)
            array.keep([j for j in range(len(members)) if j != position])
            members.remove(leaving)
            gc.collect()
            assert stacked() is None  # the memory of the larger array is given back
            assert array.variants == tuple(variants[j] for j in members)
        x = common(*IMAGES, seed=step)
        torch.stack([out.square().mean() for out in array(x)]).sum().backward()
        for j in members:
            separate[j](x).square().mean().backward()
        for j in members:
            optimizers[j].step()
            others[j].step()
            optimizers[j].zero_grad()
            others[j].zero_grad()
    for variant, reference in zip(variants, separate, strict=True):
        assert_state_close(variant, reference, 1e-9, gradients=False)
    assert variants[1].stem.weight.untyped_storage().nbytes() == variants[1].stem.weight.numel() * 8
    assert array.release() == (variants[0], variants[2])
    assert variants[0].stem.weight.untyped_storage().nbytes() == variants[0].stem.weight.numel() * 8
    assert_close(variants[0](x), separate[0](x), 1e-9)
    for wrong in ([], [0, 0], [5]):
        with pytest.raises(FusionError, match="are to be kept of"):
            VariantArray(built(Residual)).keep(wrong)


@pytest.mark.parametrize(
    ("fuse_except", "apart"),
    [(["block"], {"block"}), (["block.*"], {"block.0", "block.1", "block.2"}), (["norm", "out"], {"norm", "out"}),
     (["block", "block.0"], {"block"})],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["shared", "own"])
def test_named_parts_run_once_a_variant(fuse_except: list[str], apart: set[str], kind: str) -> None:
    batches = (common(*IMAGES), common(3, *IMAGES[1:])) if kind == "shared" else (own(*IMAGES), own(3, *IMAGES[1:]))
    array = assert_equal_to_separate(built(Residual), *batches, fuse_except=fuse_except)
    assert {entry.layer for entry in array.report.unfused} == apart
    assert {entry.why for entry in array.report.unfused} == {"fuse_except"}
    assert array.report.how("stem") == ("shared input" if kind == "shared" else "branches")


def test_a_whole_network_but_its_stem_run_once_a_variant() -> None:
    assert_equal_to_separate(built(Residual), common(*IMAGES), fuse_except=["stem", "norm", "block", "out"])


def test_names_that_are_no_modules_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'blok', which is no module of the model; some that are: block"):
        VariantArray(built(Residual), fuse_except=["blok"])
    with pytest.raises(ConfigError, match="give a list of names"):
        VariantArray(built(Residual), fuse_except="block")


def test_modules_whose_settings_differ_run_once_a_variant() -> None:
    class Net(nn.Module):
        def __init__(self, slope: float, scale: float) -> None:
            super().__init__()
            self.first, self.act, self.inner = nn.Linear(4, 4), nn.LeakyReLU(slope), Scaled(scale)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.act(self.first(x)))  # type: ignore[no-any-return]

    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale, self.part = scale, nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x) * self.scale  # type: ignore[no-any-return]

    variants = [Net(0.1 * j, 1.0 + j).double() for j in range(3)]
    array = assert_equal_to_separate(variants, common(5, 4), own(5, 4))
    assert {entry.layer: entry.why for entry in array.report.unfused} == {
        "act": "differs between variants: negative_slope",
        "inner": "differs between variants: scale",
    }


def test_the_roots_own_settings_may_differ_but_not_be_read() -> None:
    class Root(nn.Module):
        def __init__(self, rate: float) -> None:
            super().__init__()
            self.rate, self.reads, self.part = rate, False, nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x) * (self.rate if self.reads else 1)  # type: ignore[no-any-return]

    variants = [Root(0.1 * j).double() for j in range(3)]
    array = assert_equal_to_separate(variants, common(5, 4))
    for variant in variants:
        variant.reads = True
    with pytest.raises(FusionError, match=r"test_fusion_array.py:\d+: the forward reads 'rate', which differs"):
        array(common(5, 4))
    assert type(variants[0]) is Root
    assert variants[0].rate == 0.0


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda: nn.Sequential(nn.Linear(4, 5)),
            r"variant 1 has \[5, 4\] torch.float64 cpu at 0.weight where variant 0",
        ),
        (lambda: nn.Sequential(nn.Linear(4, 4, bias=False)), "variant 1 has nothing at 0.bias"),
        (lambda: nn.Sequential(nn.Bilinear(4, 4, 4)), "variant 1 has Bilinear at 0 where variant 0 has Linear"),
        (lambda: nn.Sequential(nn.LazyLinear(4)), "lazy module has no shape yet"),
    ],
)
def test_other_architectures_are_refused(other: Any, message: str) -> None:
    with pytest.raises(FusionError, match=message):
        VariantArray([nn.Sequential(nn.Linear(4, 4)).double(), other().double()])


def test_shared_modules_and_modes_that_differ_are_refused() -> None:
    one, two = built(Residual, seeds=[0, 1])
    with pytest.raises(FusionError, match="same module is given"):
        VariantArray([one, one])
    with pytest.raises(FusionError, match="at least one variant"):
        VariantArray([])
    two.stem.weight = one.stem.weight
    with pytest.raises(FusionError, match="variants 0 and 1 share a parameter"):
        VariantArray([one, two])
    array = VariantArray(built(Residual))
    array.variants[1].norm.eval()
    with pytest.raises(FusionError, match="variant 1 has parts in training mode"):
        array(common(*IMAGES))
    with pytest.raises(FusionError, match="2 values are given for 3 variants"):
        array.stack([common(2), common(2)])


def test_own_batches_and_nested_outputs() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(4, 3)

        def forward(self, batch: dict[str, Tensor], *, scale: float) -> dict[str, Any]:
            h = self.part(batch["x"])
            return {"h": h * scale, "pair": (h.sum(), batch["shared"]), "number": len(h)}

    variants = built(Net)
    array = VariantArray(variants)
    batches = [{"x": common(5, 4, seed=j), "shared": common(2)} for j in range(3)]
    outs = array(array.stack(batches), scale=2.0)
    for variant, batch, out in zip(variants, batches, outs, strict=True):
        assert_close(out, variant(batch, scale=2.0))
    with pytest.raises(FusionError, match="shapes"):
        array.stack([common(2), common(3), common(2)])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("fuse_except", [(), ("norm",), ("block",)])
def test_activation_checkpoints(reentrant: bool, fuse_except: tuple[str, ...]) -> None:
    class Checkpointed(Residual):
        def forward(self, x: Tensor) -> Tensor:
            h = checkpoint(self._stem, x.requires_grad_(), use_reentrant=reentrant)
            return self.out(checkpoint(lambda h: F.relu(self.block(h)) + h, h, use_reentrant=reentrant).mean((2, 3)))  # type: ignore[no-any-return]

        def _stem(self, x: Tensor) -> Tensor:
            return self.norm(self.stem(x)).relu()  # type: ignore[no-any-return]

    batches = common(*IMAGES), common(3, *IMAGES[1:])
    assert_equal_to_separate(built(Checkpointed), *batches, fuse_except=fuse_except, tolerance=1e-10)
    with saved_tensors_hooks(lambda saved: saved.clone(), lambda saved: saved):  # as if they were kept elsewhere
        assert_equal_to_separate(built(Checkpointed), *batches, fuse_except=fuse_except, tolerance=1e-10)


def test_states_that_modules_keep_as_attributes() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.state, self.seen = nn.GRUCell(4, 3), None, []

        def forward(self, x: Tensor) -> Tensor:
            out = self.cell(x, self.state)
            self.state = out.detach()
            self.seen = [self.state * 2, len(self.seen)]
            return out  # type: ignore[no-any-return]

    variants = built(lambda: nn.Sequential(Remembers(), nn.Linear(3, 2)))
    array = assert_equal_to_separate(variants, common(5, 4), common(5, 4, seed=6), common(5, 4, seed=7))
    assert [variant[0].state.shape for variant in variants] == [(5, 3)] * 3
    assert variants[1][0].seen[1] == 2
    array.keep([0, 2])
    for variant in variants:
        variant.zero_grad()
    assert_equal_to_separate([variants[0], variants[2]], common(5, 4), array=array)


def test_buffers_that_a_forward_replaces() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("steps", torch.zeros(3, dtype=torch.long))
            self.register_buffer("order", torch.arange(4))

        def forward(self, x: Tensor) -> Tensor:
            h = self.part(x)[:, self.order]
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
            self.steps += 1
            return h - self.mean  # type: ignore[no-any-return]

    for fuse_except in ((), ("0",)):
        variants = built(lambda: nn.Sequential(Running()))
        array = assert_equal_to_separate(variants, common(5, 4), common(5, 4, seed=6), fuse_except=fuse_except)
        assert variants[2][0].steps.tolist() == [2, 2, 2]
        variants[1][0].order.copy_(torch.tensor([3, 2, 1, 0]))  # no longer the same for all
        for variant in variants:
            variant.zero_grad()
        assert_equal_to_separate(variants, common(5, 4), array=array)


def test_scripted_modules_run_once_a_variant() -> None:
    variants = built(lambda: nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 2)))
    separate = built(lambda: nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 2)))
    array = assert_equal_to_separate(variants, common(5, 4), separate=separate)
    assert [entry.layer for entry in array.report.unfused] == ["1"]


def test_scripted_functions_run_once_a_variant() -> None:
    """In the middle of a forward and at its end, with and without gradients."""
    scripted = torch.jit.script(_halved)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            h = x + scripted(self.first(x))
            return scripted(self.second(h))

    variants = built(Net)
    array = assert_equal_to_separate(variants, common(5, 4), separate=built(Net))
    assert any("a scripted function" in entry.why for entry in array.report.unfused)
    with torch.no_grad():
        assert [out.shape for out in array(common(5, 4))] == [(5, 4)] * len(variants)


def _halved(x: Tensor) -> Tensor:
    return x / 2


def test_hooks_of_modules_run_with_them() -> None:
    variants = built(Residual)
    seen: list[tuple[int, ...]] = []
    for variant in variants:
        variant.block.register_forward_hook(lambda *_: seen.append(tuple(_[2].shape)))
    VariantArray(variants)(common(*IMAGES))
    assert seen == [(4, 8, 8, 8)]
    del seen[:]
    VariantArray(variants, fuse_except=["block"])(common(*IMAGES))
    assert seen == [(4, 8, 8, 8)] * 3


def test_a_chooser_is_asked_with_what_it_needs_and_may_time_every_way() -> None:
    sites: list[tuple[Site, list[str]]] = []

    class Last:
        def choose(self, site: Site, ways: Any) -> str:
            sites.append((site, list(ways)))
            results = [way() for way in ways.values()]
            for result in results[1:]:
                assert_close(result, results[0])
            return list(ways)[-1]

    array = assert_equal_to_separate(built(Residual), common(*IMAGES), chooser=Last())
    (stem, ways), (block, _), (out, _) = sites
    assert (stem.layer, stem.operation, stem.variants, stem.device) == ("stem", "conv2d", 3, "cpu")
    assert stem.shapes == ((4, 3, 8, 8), (3, 8, 3, 3, 3))
    assert ways == ["shared input", "grouped", "branches"]
    assert (block.layer, out.operation, out.shapes[0]) == ("block.0", "linear", (3, 4, 8))
    assert {array.report.how(layer) for layer in ("stem", "block.0", "out")} == {"branches"}


def test_the_report_is_a_table() -> None:
    array = VariantArray(built(Residual), fuse_except=["out"])
    array(common(*IMAGES))
    array(common(*IMAGES))
    lines = array.report.lines()
    assert lines[0].split() == ["layer", "operation", "how", "calls", "why"]
    assert lines[1].split() == ["stem", "conv2d", "shared", "input", "2"]
    assert lines[-1].split() == ["out", "Linear", "per", "variant", "2", "fuse_except"]
    array.report.clear()
    assert not array.report.entries


def test_nothing_is_left_behind_after_an_error() -> None:
    class Fails(Residual):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            if Fails.fails:
                raise ValueError("mine")
            return h

    variants = built(Fails)
    array = VariantArray(variants)
    before = dict(vars(variants[0]))
    Fails.fails = True
    with pytest.raises(ValueError, match="mine"):
        array(common(*IMAGES))
    Fails.fails = False
    assert vars(variants[0]).keys() == before.keys()
    assert variants[0].stem.weight.shape == (8, 3, 3, 3)
    assert "forward" not in vars(variants[0].stem)
    assert torch.ones(2).shape == (2,)
    assert_equal_to_separate(variants, common(*IMAGES), array=array)
    with array.fused(), pytest.raises(FusionError, match="already running"):
        array(common(*IMAGES))


def test_hooks_of_parameters_and_backward_hooks_see_one_variants_gradients() -> None:
    def build() -> nn.Module:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        net[0].weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        net[0].bias.register_post_accumulate_grad_hook(_doubled)
        net[1].register_full_backward_hook(lambda _, given, out: tuple(one * 3 for one in given))
        return net

    variants = built(build)
    array = assert_equal_to_separate(variants, common(5, 4), separate=built(build))
    assert [entry.layer for entry in array.report.unfused] == ["1"]


def _doubled(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def test_inference_mode_as_lightning_validates() -> None:
    variants = built(Residual)
    array = VariantArray(variants, fuse_except=["block.2"])
    array.eval()
    with torch.inference_mode():
        for found, variant in zip(array(common(*IMAGES)), variants, strict=True):
            assert_close(found, variant(common(*IMAGES)))


def test_a_variants_state_takes_the_place_of_one(tmp_path: Path) -> None:
    array = VariantArray(built(Residual, seeds=range(8)))
    torch.save(array.state_dict(3), tmp_path / "one.pt")
    torch.save(array.release()[3].state_dict(), tmp_path / "alone.pt")
    one, alone = ((tmp_path / name).stat().st_size for name in ("one.pt", "alone.pt"))
    assert one == pytest.approx(alone, rel=0.05)
    assert_close(torch.load(tmp_path / "one.pt"), torch.load(tmp_path / "alone.pt"))


@dataclass
class Outputs:
    scores: Tensor
    name: str = "mine"


def test_dataclasses_and_objects_as_outputs() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Outputs:
            out = self.inner(x)
            return Outputs(out.scores * 2, out.name)  # type: ignore[no-any-return]

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Outputs:
            return Outputs(self.part(x), "inner")

    class Hides(Inner):
        def forward(self, x: Tensor) -> Any:
            return SimpleNamespace(scores=self.part(x))

    x = common(5, 4)
    for fuse_except in ((), ("inner",)):
        variants = built(Net)
        for found, variant in zip(VariantArray(variants, fuse_except=fuse_except)(x), variants, strict=True):
            assert (type(found), found.name) == (Outputs, "inner")
            assert_close(found.scores, variant(x).scores)
    with pytest.raises(FusionError, match="a SimpleNamespace holds tensors of all variants"):
        VariantArray(built(Hides))(x)


def test_a_part_that_writes_to_its_input_changes_it_for_the_caller() -> None:
    class Net(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(4, 4), inner

        def forward(self, x: Tensor, shared: bool) -> Tensor:
            h = x * 2 if shared else self.first(x)
            return self.inner(h) + h  # type: ignore[no-any-return]

    class Adds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x += 1
            return x

    class Later(Adds):
        """Only in its second forward."""

        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) if self.calls > 1 else x + 1

    for inner in (lambda: nn.ReLU(inplace=True), Adds):
        for shared in (True, False):
            variants = built(lambda inner=inner: Net(inner()))  # type: ignore[misc]
            assert_equal_to_separate(variants, (common(5, 4), shared), fuse_except=["inner"])
    array = VariantArray(built(lambda: Net(Later())), fuse_except=["inner"])
    array(common(5, 4), True)
    with pytest.raises(FusionError, match="inner writes in place to a tensor that all variants share"):
        array(common(5, 4), True)


def test_the_usual_choice_depends_on_device_and_kind_of_convolution() -> None:
    def chosen(weight: tuple[int, ...], *ways: str, device: str = "cpu") -> str:
        site = Site("", "conv2d", ((3, 4, 8, 5, 5), weight), (), "torch.float32", device, 3)
        return Usual().choose(site, dict.fromkeys(ways, lambda: None))

    dense, depthwise = (3, 8, 8, 3, 3), (3, 8, 1, 3, 3)
    assert chosen(dense, "shared input", "grouped", "branches") == "shared input"
    assert chosen(dense, "grouped", "branches") == "branches"
    assert chosen(dense, "grouped", "branches", device="cuda") == "grouped"
    assert chosen(depthwise, "grouped", "branches") == "grouped"
    assert chosen((3, 8, 8, 1, 1), "grouped", "batched matmul", "branches") == "batched matmul"


class Configured(nn.Module):
    """Reads a setting that its variants differ in, wherever it is kept."""

    def __init__(self, kind: str, factor: float) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        if kind == "private":
            self._factor = factor
        elif kind == "object":
            self.config = SimpleNamespace(factor=factor, inner={"factor": factor})
        elif kind == "partial":
            self.scale = functools.partial(torch.mul, other=factor)
        else:
            self.scale = lambda x: x * factor

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if hasattr(self, "scale"):
            return self.scale(h)  # type: ignore[no-any-return]
        return h * (self.config.factor if hasattr(self, "config") else self._factor)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["private", "object", "partial", "closure"])
def test_no_setting_of_one_variant_is_taken_for_all(kind: str) -> None:
    array = VariantArray([Configured(kind, factor) for factor in (1.0, 2.0)])
    with pytest.raises(FusionError, match="differs between the variants"):
        array(torch.randn(2, 3))
    inside = VariantArray([nn.Sequential(Configured(kind, factor)) for factor in (1.0, 2.0)])
    x = torch.randn(2, 3)
    for out, module in zip(inside(x), inside.variants, strict=True):
        torch.testing.assert_close(out, module(x))
