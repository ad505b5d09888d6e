"""Dropout in arrays: own masks, own probabilities, and own streams of random numbers."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pl_pipe.errors import FusionError
from pl_pipe.fusion import OwnStreams, VariantArray
from tests.fusion_cases import assert_close, assert_state_close, built, common, own, worth

# fmt: off
KINDS: dict[str, tuple[type[nn.Module], tuple[int, ...], int]] = {
    "elements": (nn.Dropout, (20, 30), 2),
    "lines": (nn.Dropout1d, (40, 30, 3), 2),
    "images": (nn.Dropout2d, (40, 30, 2, 2), 2),
    "cubes": (nn.Dropout3d, (40, 30, 2, 1, 2), 2),
    "one line": (nn.Dropout1d, (600, 3), 1),
    "one cube": (nn.Dropout3d, (600, 2, 1, 2), 1),
}
# fmt: on


@pytest.mark.parametrize("kind", ["shared", "own"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_own_masks_and_probabilities(name: str, in_place: bool, kind: str) -> None:
    layer, shape, units = KINDS[name]
    probabilities = (0.0, 0.3, 0.8, 1.0)
    torch.manual_seed(0)
    array = VariantArray([nn.Sequential(nn.Identity(), layer(p, inplace=in_place)) for p in probabilities])
    x = torch.ones(shape) if kind == "shared" else own(*shape, width=4) * 0 + 1
    if kind == "own":
        x = array.stack(list(x))
    elif in_place:
        with pytest.raises(FusionError, match="writes the variants' numbers into a tensor that they all share"):
            array(x)
        return
    outs = array(x)
    for p, out in zip(probabilities, outs, strict=True):
        torch.testing.assert_close(out[out > 0], torch.full_like(out[out > 0], 1 / max(1 - p, 1e-9)))
        of_units = out.unsqueeze(-1).flatten(units)
        assert (of_units == of_units[..., :1]).all()  # whole channels
        kept = of_units[..., 0].gt(0).double().mean().item()
        assert kept == pytest.approx(1 - p, abs=0.08)
    assert not torch.equal(outs[1] > 0, outs[2] > 0)
    array.eval()
    for out in array(torch.ones(shape)):
        assert (out == 1).all()


@pytest.mark.parametrize("layer", [nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_alpha_dropout_keeps_mean_and_variance(layer: type[nn.Module]) -> None:
    torch.manual_seed(0)
    array = VariantArray([nn.Sequential(nn.Identity(), layer(p)) for p in (0.1, 0.4)])
    for p, out in zip((0.1, 0.4), array(torch.randn(400, 400)), strict=True):
        assert out.mean().item() == pytest.approx(0.0, abs=0.03)
        assert out.std().item() == pytest.approx(1.0, abs=0.03)
        lowest = out.mode().values.mode().values
        assert (out == lowest).double().mean().item() == pytest.approx(p, abs=0.02)


def test_masks_differ_between_variants_of_one_probability_and_from_call_to_call() -> None:
    array = VariantArray([nn.Sequential(nn.Identity(), nn.Dropout(0.5)) for _ in range(3)])
    first, second, third = (out > 0 for out in array(torch.ones(100)))
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    assert not torch.equal(first, array(torch.ones(100))[0] > 0)
    torch.manual_seed(3)
    one = array(torch.ones(100))
    torch.manual_seed(3)
    assert_close(array(torch.ones(100)), one)


class Noisy(nn.Module):
    """Random numbers of every origin: dropout of all kinds, attention's, noise, and a recurrent network's."""

    def __init__(self, p: float = 0.3) -> None:
        super().__init__()
        self.conv, self.channels = nn.Conv2d(3, 8, 3, padding=1), nn.Dropout2d(p)
        self.act, self.elements = nn.RReLU(), nn.Dropout(p, inplace=True)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.2, batch_first=True)
        self.rnn = nn.LSTM(8, 4, 2, dropout=0.4, batch_first=True)
        self.alpha, self.out = nn.AlphaDropout(p), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(x, 0.1, self.training) + torch.randn_like(x) * 0.1
        h = self.channels(self.act(self.conv(h)))
        h = h.flatten(2).transpose(1, 2)
        h = self.encoder(self.elements(h * 1))
        keep = torch.empty(h.shape[0], 1, 1, dtype=h.dtype).bernoulli_(0.7)
        h, _ = self.rnn(h * keep + torch.rand(8, dtype=h.dtype))
        return self.out(self.alpha(h.mean(1)))  # type: ignore[no-any-return]


class Recomputed(Noisy):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x * 1, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("build", [Noisy, Recomputed])
@pytest.mark.parametrize("fuse_except", [(), ("encoder", "channels")])
def test_own_streams_give_the_numbers_of_separate_runs(build: Any, fuse_except: tuple[str, ...]) -> None:
    """Also as members of an array from which others leave, and with probabilities of their own."""
    variants = [build(p).double() for p in (0.1, 0.3, 0.5)]
    separate = copy.deepcopy(variants)
    array = VariantArray(variants, streams=OwnStreams.seeded([11, 12, 13]), fuse_except=fuse_except)
    torch.manual_seed(99)
    members = [0, 1, 2]
    histories: list[list[Tensor]] = [[], [], []]
    for step in range(4):
        if step == 2:
            array.keep([0, 2])
            members = [0, 2]
        outs = array(common(4, 3, 4, 4, seed=step))
        torch.stack([worth(out) for out in outs]).sum().backward()
        for j, out in zip(members, outs, strict=True):
            histories[j].append(out)
    after = torch.rand(1)
    torch.manual_seed(99)
    assert torch.equal(after, torch.rand(1))  # the process's own stream was not touched
    for j, (seed, reference) in enumerate(zip((11, 12, 13), separate, strict=True)):
        torch.manual_seed(seed)
        for step, found in enumerate(histories[j]):
            expected = reference(common(4, 3, 4, 4, seed=step))
            worth(expected).backward()
            assert_close(found, expected, 1e-10, f"variant {j}, step {step}")
        assert_state_close(variants[j], reference, 1e-10)


def test_streams_can_be_saved_and_put_back() -> None:
    streams = OwnStreams.seeded([1, 2])
    array = VariantArray([nn.Sequential(nn.Dropout(0.5)) for _ in range(2)], streams=streams)
    array(torch.ones(50))
    states = streams.states
    first = array(torch.ones(50))
    streams.states = states
    assert_close(array(torch.ones(50)), first)


def test_without_dropping_arrays_are_exact() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.0), nn.AlphaDropout(0.0), nn.Dropout1d(0.0))

    variants = built(build)
    separate = copy.deepcopy(variants)
    for found, reference in zip(VariantArray(variants)(common(4, 6)), separate, strict=True):
        assert_close(found, reference(common(4, 6)))


def test_probabilities_may_change_from_call_to_call() -> None:
    array = VariantArray([nn.Sequential(nn.Dropout(0.5)) for _ in range(2)])
    array(torch.ones(50))
    array.variants[1][0].p = 1.0
    first, second = array(torch.ones(50))
    assert first.sum() > 0
    assert second.sum() == 0
    array.variants[1][0].p = 1.5
    with pytest.raises(ValueError, match="probability has to be between 0 and 1"):
        array(torch.ones(3))
