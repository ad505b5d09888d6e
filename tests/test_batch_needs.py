"""Which stages take tensors of the batch, and what a rank without it does: steps with ghosts, in one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pl_pipe.comm import LocalNetwork
from pl_pipe.errors import ConfigError, DataError
from pl_pipe.runtime.outlined_batches import Outlines, outline, unfit_part
from pl_pipe.stages import IDLE, Ownership, Pipe
from pl_pipe.strategies.pipeline.settings import PipelineSettings
from pl_pipe.tensors.ghosts import BatchNeededError

LAST = 3


class Keeper(nn.Linear):
    """A layer that looks at what somebody put into it."""

    kept: Tensor | None = None

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h if self.kept is None else h + self.kept)


class Chain(nn.Module):
    """A stage a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Keeper(4, 4) for _ in range(LAST + 1))
        self.layers[2].register_buffer("mean", torch.zeros(4))

    def forward(self, h: Tensor, first: int = 0) -> Tensor:
        for layer in self.layers[first:]:
            h = layer(h)
        return h


def outlined() -> dict[str, Tensor]:
    batch = {"x": torch.randn(5, 4), "y": torch.zeros(5, dtype=torch.long), "keep": torch.rand(5) > 0.5}
    found: dict[str, Tensor] = outline(batch)
    assert all(tensor.is_meta for tensor in found.values())
    return found


def pipe(stage: int = IDLE, network: LocalNetwork | None = None) -> Pipe:
    model = Chain()
    owners = {f"layers.{index}": index for index in range(LAST + 1)}
    return Pipe(
        model, Ownership.from_mapping(model, owners), stage=stage, transport=(network or LocalNetwork()).transport()
    )


def needs(run: Callable[[Any, dict[str, Tensor]], Any]) -> set[int]:
    batch = outlined()
    with pipe() as found:
        return set(found.stages_needing_batch(lambda _: run(found.model, batch)))


def labelled(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def skipping(model: Any, batch: Any) -> Tensor:
    return model(model.layers[1](model.layers[0](batch["x"])) * batch["x"].abs(), first=2).sum()


def masked(model: Any, batch: Any) -> Tensor:
    return model(batch["x"]).masked_fill(batch["keep"][:, None], 0).sum()


def keeping(model: Any, batch: Any) -> Tensor:
    model.layers[2].kept = batch["x"] + 1
    return model(batch["x"]).sum()


def filling(model: Any, batch: Any) -> Tensor:
    model.layers[2].mean = batch["x"].mean(0)
    return model(batch["x"]).sum()


def read_at_the_end(model: Any, batch: Any) -> Tensor:
    h = model(batch["x"])
    return h.sum() if h.sum().item() > 0 else h.mean()


def read_in_the_middle(model: Any, batch: Any) -> Tensor:
    h = model.layers[1](model.layers[0](batch["x"]))
    return model(h if h.mean() > 0 else h + batch["x"], first=2).sum()


def constants(model: Any, batch: Any) -> Tensor:
    """Shapes and devices of the batch are known everywhere."""
    h = model.layers[1](model.layers[0](batch["x"]))
    return model(h + torch.arange(len(batch["x"]), device=batch["x"].device)[:, None] + torch.rand(4), first=2).sum()


def noisy(model: Any, batch: Any) -> Tensor:
    h = model.layers[1](model.layers[0](batch["x"]))
    return model(h + torch.randn_like(batch["x"]), first=2).sum()


@pytest.mark.parametrize(
    ("run", "stages"),
    [
        (labelled, {0, LAST}),
        (skipping, {0, 1}),
        (masked, {0, LAST}),
        (keeping, {0, 2}),
        (filling, {0, 2}),
        (read_at_the_end, {0, LAST}),
        (read_in_the_middle, {0, 1, 2, LAST}),
        (constants, {0}),
        (noisy, {0}),
    ],
)
def test_stages_that_take_tensors_of_the_batch(run: Callable[..., Any], stages: set[int]) -> None:
    assert needs(run) == stages


def reads(model: Any, batch: Any) -> Any:
    return model(batch["x"]).sum() * batch["x"].mean().item()


def indexes(model: Any, batch: Any) -> Any:
    return model(batch["x"])[batch["keep"]].sum()


def selects(model: Any, batch: Any) -> Any:
    return model(batch["x"][batch["keep"]]).sum()


def drops(model: Any, batch: Any) -> Any:
    return model(F.dropout(batch["x"])).sum()


def changes(model: Any, batch: Any) -> Any:
    return batch["x"].mul_(model(batch["x"])).sum()


def copies(model: Any, batch: Any) -> Any:
    room = torch.zeros(5, 4)
    room[:] = batch["x"]
    return model(room).sum()


def packs(model: Any, batch: Any) -> Any:
    return model(nn.utils.rnn.pack_padded_sequence(batch["x"][None], batch["y"][:1], batch_first=True).data).sum()


@pytest.mark.parametrize("run", [reads, indexes, selects, drops, changes, copies, packs])
def test_what_no_rank_can_do_without_the_batch(run: Callable[..., Any]) -> None:
    with pytest.raises(BatchNeededError, match=r"test_batch_needs\.py:\d+: .* needs numbers .* set load_data=all"):
        needs(run)


@pytest.mark.parametrize("run", [skipping, keeping, reads])
def test_a_rank_without_the_batch_never_computes_with_it(run: Callable[..., Any]) -> None:
    """Stage 0 sends on what the stage in question then meets an absent tensor with."""
    network = LocalNetwork(timeout_s=5)
    absent = outlined()
    batch = {name: torch.ones(tensor.shape, dtype=tensor.dtype) for name, tensor in absent.items()}
    with pipe(0, network) as first, first.step(0):
        run(first.model, batch)
    with pipe(1, network) as second:
        second.batch_is_here = False
        if run is keeping:
            second.model.layers[1].kept = absent["x"]
        with pytest.raises(BatchNeededError, match="set load_data=all"), second.step(0):
            run(second.model, absent)


def test_a_batch_that_cannot_be_outlined() -> None:
    assert unfit_part({"x": torch.ones(2), "names": ["a", "b"], "n": (1, 2.0, None)}) is None
    assert unfit_part([torch.ones(2), {1, 2}]) == "a set"
    assert unfit_part(torch.ones(2).to_sparse()) == "a tensor of another kind (Tensor)"
    with pytest.raises(DataError, match=r"a set, which cannot be outlined .* set load_data=all"):
        outline([{1, 2}])


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="load_data=some is unknown; choose one of all, needed"):
        PipelineSettings(load_data="some")


class Recorded:
    """A channel whose messages wait in a dictionary."""

    def __init__(self) -> None:
        self.told: dict[tuple[int, int], bytes | None] = {}

    def tell(self, place: tuple[int, int], content: bytes | None) -> None:
        self.told[place] = content

    def hear(self, place: tuple[int, int]) -> bytes | None:
        return self.told.pop(place)

    def forget(self, iteration: int) -> None:
        self.told = {place: content for place, content in self.told.items() if place[0] != iteration}


def test_outlines_follow_their_batches_through_every_iteration() -> None:
    channel = Recorded()
    source, other = Outlines(channel, tells=True), Outlines(channel, loads=False)
    batches = [(torch.ones(3, 2), "a"), (torch.ones(1, 2), "b")]

    def never() -> Any:
        raise AssertionError("a rank that loads none must not iterate its loader")

    for _ in range(2):
        assert list(source.through(lambda: iter(batches))) == batches
        found = list(other.through(never))
        assert [(tuple(tensor.shape), tensor.is_meta, text) for tensor, text in found] == [
            ((3, 2), True, "a"),
            ((1, 2), True, "b"),
        ]
    assert not channel.told
