"""Models for the ghost tests, and ranks as threads to run them on.

torchvision's models and a few that no tracer takes, with small inputs. Dropout is off: each stage draws from a stream
of its own, so masks would differ from the single run's.
"""

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from pl_pipe.comm import CommunicationError, LocalNetwork, Transport
from pl_pipe.stages import Ownership, Pipe, PipeStep

Batch = tuple[Tensor, ...]
Step = Callable[[nn.Module, Any], Tensor]


class Trial(NamedTuple):
    """A model, a step on it, and batches."""

    build: Callable[[], nn.Module]
    step: Step
    batches: list[Any]
    lr: float = 0.1
    autocast: bool = False


@dataclass
class Outcome:
    """What a training of a few steps gave."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    transfers: int = 0
    bytes_sent: int = 0
    forgotten: int = 0
    """Steps that ran again for their backward."""


def single_run(trial: Trial, *, seed: int = 0) -> Outcome:
    """The oracle: plain PyTorch."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = trial.build()
    optimizer = torch.optim.SGD(model.parameters(), trial.lr)
    outcome = Outcome()
    for batch in trial.batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=trial.autocast):
            loss = trial.step(model, batch)
        loss.backward()
        outcome.losses.append(loss.item())
        outcome.gradients.append(_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    outcome.state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return outcome


def piped_run(
    trial: Trial,
    owners: dict[str, int],
    *,
    seed: int = 0,
    timeout_s: float = 10.0,
    network: LocalNetwork | None = None,
    **options: Any,
) -> Outcome:
    """The same over stages, each a thread with a copy of the model; raises the first error that is not a time-out."""
    torch.manual_seed(seed)
    origin = trial.build()
    stages = max(owners.values()) + 1
    network = LocalNetwork(timeout_s=timeout_s) if network is None else network
    parts = [Outcome() for _ in range(stages)]
    errors: list[BaseException] = []

    def rank(stage: int) -> None:
        torch.set_num_threads(1)  # a new thread begins with as many as there are cores, and sums in another order
        try:
            train_stage(trial, copy.deepcopy(origin), owners, stage, network.transport(), parts[stage], **options)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(stage,), daemon=True) for stage in range(stages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise next((error for error in errors if not isinstance(error, CommunicationError)), errors[0])
    assert not network.unread(), [str(message) for message in network.unread()]
    whole = Outcome(losses=max((part.losses for part in parts), key=len), transfers=network.sent)
    whole.bytes_sent, whole.forgotten = network.sent_bytes, sum(part.forgotten for part in parts)
    for step in range(len(trial.batches)):
        whole.gradients.append({name: g for part in parts for name, g in part.gradients[step].items()})
    for part in parts:
        whole.state.update(part.state)
    return whole


def train_stage(
    trial: Trial,
    model: nn.Module,
    owners: dict[str, int],
    stage: int,
    transport: Transport,
    outcome: Outcome,
    **options: Any,
) -> None:
    """What one rank does: a few synchronous steps, each followed by its update."""
    ownership = Ownership.from_mapping(model, owners)
    names = [name for name, _ in model.named_parameters()]
    with Pipe(model, ownership, stage=stage, transport=transport, **options) as pipe:
        assert [name for name, _ in model.named_parameters()] == names
        optimizer = torch.optim.SGD(model.parameters(), trial.lr)
        for number, batch in enumerate(trial.batches):
            loss = None

            def run(_: PipeStep, batch: Any = batch) -> Tensor:
                with torch.autocast("cpu", torch.bfloat16, enabled=trial.autocast):
                    return trial.step(model, batch)

            with pipe.step(number, batch) as step:
                loss = run(step)
            outcome.forgotten += step.forget(run)
            step.backward(loss)
            if loss is not None and not loss.is_meta:
                outcome.losses.append(loss.item())
            outcome.gradients.append(_gradients(model))
            optimizer.step()
            optimizer.zero_grad()
        outcome.state = {
            name: tensor.detach().clone()
            for name, tensor in model.state_dict().items()
            if ownership.homes[name] == stage and not tensor.is_meta
        }


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(piped: Outcome, single: Outcome) -> None:
    """Bit for bit: losses, gradients of every step, and parameters and buffers at the end."""
    assert all(loss == loss for loss in single.losses), "the reference diverged"
    assert piped.losses == single.losses
    for number, (got, want) in enumerate(zip(piped.gradients, single.gradients, strict=True)):
        assert set(got) == set(want), f"gradients of step {number}"
        for name, gradient in want.items():
            assert torch.equal(got[name], gradient), f"gradient of {name} in step {number}"
    assert set(piped.state) == set(single.state)
    for name, tensor in single.state.items():
        assert torch.equal(piped.state[name], tensor), name


def assert_close(piped: Outcome, single: Outcome) -> None:
    """Up to the order of sums: losses, and gradients of the first step."""
    assert piped.losses == pytest.approx(single.losses, rel=1e-6)
    assert set(piped.gradients[0]) == set(single.gradients[0])
    for name, gradient in single.gradients[0].items():
        torch.testing.assert_close(piped.gradients[0][name], gradient, rtol=1e-4, atol=1e-6)


def quiet(model: nn.Module) -> nn.Module:
    """Without random numbers."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention | nn.LSTM):
            module.dropout = 0.0
        if type(module).__name__ == "StochasticDepth":
            module.p = 0.0
    return model


def planned(trial: Trial, stages: int) -> dict[str, int]:
    """Leaf modules in the order they run, in stages of equal counts: cuts fall inside blocks."""
    order = _called_leaves(trial.build, trial.step)
    return {name: stages * index // len(order) for index, name in enumerate(order)}


@cache
def _called_leaves(build: Callable[[], nn.Module], step: Step) -> tuple[str, ...]:
    """Leaf modules in the order they run; cached by what a trial is made of."""
    (trial,) = [trial for trial in MODELS.values() if trial.build is build and trial.step is step]
    torch.manual_seed(0)
    model = trial.build()
    order: dict[str, None] = {}
    for name, module in model.named_modules():
        is_leaf = next(module.children(), None) is None or isinstance(module, nn.MultiheadAttention)
        parent = model.get_submodule(name.rpartition(".")[0])
        if name and is_leaf and not isinstance(parent, nn.MultiheadAttention):
            module.register_forward_hook(lambda *_, name=name: order.setdefault(name))
    with torch.no_grad():
        trial.step(model, trial.batches[0])
    return tuple(order)


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def images(size: int, count: int = 2, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.rand(count, 3, size, size, generator=generator)
    return pictures, torch.randint(0, 10, (count,), generator=generator)


def _narrowed(layer: nn.Module) -> nn.Module:
    if not isinstance(layer, nn.Linear):
        return layer
    return nn.Linear(*(32 if width == 4096 else width for width in (layer.in_features, layer.out_features)))


def vision(name: str, size: int = 32, *, lr: float = 1e-3, **options: Any) -> Trial:
    def build() -> nn.Module:
        model = torchvision.models.get_model(name, num_classes=10, **options)
        if name.startswith(("vgg", "alexnet")):  # nine tenths of their weights are in one layer
            model.classifier = nn.Sequential(*[_narrowed(layer) for layer in model.classifier])
        return quiet(model)

    return Trial(build, cross_entropy, [images(size, seed=seed) for seed in range(3)], lr=lr)


class Seq2Seq(nn.Module):
    """Recurrent encoder and decoder with attention; one embedding for both, so it is called from a later stage too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.encoder = nn.LSTM(16, 16, bidirectional=True, batch_first=True)
        self.encoder2 = nn.LSTM(32, 32, batch_first=True)
        self.decoder = nn.LSTM(16, 32, batch_first=True)
        self.attention = nn.Linear(32, 32)
        self.out = nn.Linear(64, 50)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first, _ = self.encoder(self.embedding(x))
        memory, state = self.encoder2(first)
        memory = memory + first
        out, _ = self.decoder(self.embedding(y), state)
        weights = torch.softmax(self.attention(out) @ memory.transpose(1, 2), -1)
        return self.out(torch.cat([out, weights @ memory], -1))


class Packed(nn.Module):
    """Packed sequences: shapes follow from the lengths, which are numbers of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.first = nn.LSTM(16, 16, batch_first=True)
        self.second = nn.LSTM(16, 16, batch_first=True)
        self.out = nn.Linear(16, 50)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = self.embedding(x)
        for layer in (self.first, self.second):
            packed = pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
            h, _ = pad_packed_sequence(layer(packed)[0], batch_first=True)
        return self.out(h)


def small_vit(patch: int) -> Trial:
    """torchvision's vision transformer, its width and depth aside."""

    def build() -> nn.Module:
        transformer = torchvision.models.VisionTransformer(2 * patch, patch, 4, 4, 32, 64, num_classes=10)
        return quiet(transformer)

    return Trial(build, cross_entropy, [images(2 * patch, seed=seed) for seed in range(3)])


def small_swin(*, version_2: bool = False) -> Trial:
    from torchvision.models import swin_transformer as swin

    def build() -> nn.Module:
        block = swin.SwinTransformerBlockV2 if version_2 else swin.SwinTransformerBlock
        merging = swin.PatchMergingV2 if version_2 else swin.PatchMerging
        sizes = {"patch_size": [4, 4], "embed_dim": 12, "depths": [2, 2, 2], "num_heads": [2, 2, 4]}
        model = swin.SwinTransformer(
            **sizes, window_size=[4, 4], num_classes=10, block=block, downsample_layer=merging, stochastic_depth_prob=0
        )
        return quiet(model)

    return Trial(build, cross_entropy, [images(64, seed=seed) for seed in range(3)])


def small_convnext() -> Trial:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    def build() -> nn.Module:
        return quiet(
            ConvNeXt([CNBlockConfig(16, 32, 2), CNBlockConfig(32, 48, 2), CNBlockConfig(48, None, 2)], 0.0, 1.0, 10)
        )

    return Trial(build, cross_entropy, [images(32, seed=seed) for seed in range(3)])


def small_maxvit() -> nn.Module:
    """maxvit_t takes nothing smaller than 224 pixels."""
    return quiet(
        torchvision.models.MaxVit(
            input_size=(32, 32),
            stem_channels=8,
            partition_size=2,
            block_channels=[8, 16],
            block_layers=[1, 2],
            head_dim=4,
            stochastic_depth_prob=0.0,
            num_classes=10,
        )
    )


def transformer() -> nn.Module:
    from lightning.pytorch.demos.transformer import Transformer

    return quiet(Transformer(vocab_size=40, nhid=32, ninp=16))


def _tokens(vocabulary: int, *sizes: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocabulary, size, generator=generator) for size in sizes]


def _language_step(model: nn.Module, batch: Batch) -> Tensor:
    return F.nll_loss(model(batch[0], batch[1]), batch[1].view(-1))


def _translation_step(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0], batch[1]).flatten(0, 1), batch[1].flatten())


_WORDS = _tokens(40, (4, 12), (4, 9), (4, 12))
_SOURCES = _tokens(50, (4, 9), (3, 5), (4, 9))
_TARGETS = _tokens(50, (4, 7), (3, 6), (4, 7))
_LENGTHS = [torch.tensor(lengths) for lengths in ([9, 3, 5, 7], [9, 8, 5, 2], [9, 3, 5, 7])]

MODELS: dict[str, Trial] = {
    **{
        name: vision(name)
        for name in (
            *("resnet18", "resnet50", "vgg11", "vgg11_bn", "densenet121", "mobilenet_v3_small"),
            *("mobilenet_v3_large", "shufflenet_v2_x0_5", "shufflenet_v2_x1_0", "squeezenet1_0", "squeezenet1_1"),
            *("efficientnet_b0", "efficientnet_b1", "efficientnet_v2_s", "mnasnet0_5", "mnasnet1_0"),
            *("regnet_y_400mf", "resnext50_32x4d"),
        )
    },
    **{name: vision(name, 64, lr=1e-5) for name in ("mobilenet_v2", "regnet_x_400mf")},
    "alexnet": vision("alexnet", 64),
    "wide_resnet50_2": vision("wide_resnet50_2"),
    "convnext_tiny": small_convnext(),
    "swin_t": small_swin(),
    "swin_v2_t": small_swin(version_2=True),
    "vit_b_32": small_vit(patch=32),
    "vit_b_16": small_vit(patch=16),
    "maxvit": Trial(small_maxvit, cross_entropy, [images(32, seed=seed) for seed in range(3)], lr=1e-3),
    "googlenet": vision("googlenet", 32, aux_logits=False, init_weights=False),
    "inception_v3": vision("inception_v3", 75, aux_logits=False, init_weights=False),
    "lightning transformer": Trial(transformer, _language_step, [(words, words.roll(-1, 1)) for words in _WORDS]),
    "seq2seq": Trial(Seq2Seq, _translation_step, list(zip(_SOURCES, _TARGETS, strict=True))),
    "packed": Trial(
        Packed,
        lambda model, batch: model(*batch).pow(2).mean(),
        [(words, lengths) for words, lengths in zip(_tokens(50, (4, 9), (4, 9), (4, 9)), _LENGTHS, strict=True)],
    ),
}
