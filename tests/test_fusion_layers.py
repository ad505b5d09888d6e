"""Every fused layer against the variants' own: forward, backward and buffers; shared and own inputs; train and eval."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pl_pipe.errors import FusionError
from pl_pipe.fusion import Preference, VariantArray
from pl_pipe.fusion.rules import convolution, linear
from tests.fusion_cases import Build, assert_close, assert_equal_to_separate, built, common, own

IMAGE = (4, 6, 7, 5)
LINE = (4, 6, 9)
CUBE = (3, 4, 5, 4, 3)

# fmt: off
CONVOLUTIONS: dict[str, tuple[Build, tuple[int, ...]]] = {
    "plain": (lambda: nn.Conv2d(6, 8, 3), IMAGE),
    "no bias": (lambda: nn.Conv2d(6, 4, 3, padding=1, bias=False), IMAGE),
    "stride": (lambda: nn.Conv2d(6, 8, (3, 2), stride=(2, 1), padding=(1, 0)), IMAGE),
    "dilation": (lambda: nn.Conv2d(6, 8, 3, padding=2, dilation=2), IMAGE),
    "groups": (lambda: nn.Conv2d(6, 9, 3, groups=3), IMAGE),
    "depthwise": (lambda: nn.Conv2d(6, 6, 3, padding=1, groups=6), IMAGE),
    "depthwise wider": (lambda: nn.Conv2d(6, 12, 3, groups=6, stride=2), IMAGE),
    "1x1": (lambda: nn.Conv2d(6, 8, 1), IMAGE),
    "1x1 no bias": (lambda: nn.Conv2d(6, 8, 1, bias=False), IMAGE),
    "1x1 stride": (lambda: nn.Conv2d(6, 8, 1, stride=2), IMAGE),
    "1x1 groups": (lambda: nn.Conv2d(6, 8, 1, groups=2), IMAGE),
    "1x1 padding": (lambda: nn.Conv2d(6, 8, 1, padding=1), IMAGE),
    "same": (lambda: nn.Conv2d(6, 8, 3, padding="same"), IMAGE),
    "valid": (lambda: nn.Conv2d(6, 8, 1, padding="valid"), IMAGE),
    "reflect": (lambda: nn.Conv2d(6, 8, 3, padding=1, padding_mode="reflect"), IMAGE),
    "replicate": (lambda: nn.Conv2d(6, 8, 3, padding=1, padding_mode="replicate"), IMAGE),
    "circular": (lambda: nn.Conv2d(6, 8, 3, padding=1, padding_mode="circular"), IMAGE),
    "one image": (lambda: nn.Conv2d(6, 8, 3), IMAGE[1:]),
    "1d": (lambda: nn.Conv1d(6, 8, 3, padding=1), LINE),
    "1d pointwise": (lambda: nn.Conv1d(6, 8, 1), LINE),
    "1d reflect": (lambda: nn.Conv1d(6, 8, 3, padding=1, padding_mode="reflect"), LINE),
    "3d": (lambda: nn.Conv3d(4, 6, 3, padding=1, stride=2), CUBE),
    "3d groups": (lambda: nn.Conv3d(4, 6, 2, groups=2), CUBE),
    "3d replicate": (lambda: nn.Conv3d(4, 6, 3, padding=1, padding_mode="replicate"), CUBE),
    "transposed": (lambda: nn.ConvTranspose2d(6, 8, 3), IMAGE),
    "transposed stride": (lambda: nn.ConvTranspose2d(6, 8, 3, stride=2, padding=1, output_padding=1), IMAGE),
    "transposed groups": (lambda: nn.ConvTranspose2d(6, 9, 3, groups=3, dilation=2, bias=False), IMAGE),
    "transposed 1d": (lambda: nn.ConvTranspose1d(6, 4, 4, stride=2), LINE),
    "transposed 3d": (lambda: nn.ConvTranspose3d(4, 2, 2, stride=2), CUBE),
}
LAYERS: dict[str, tuple[Build, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 5), (4, 6)),
    "linear no bias": (lambda: nn.Linear(6, 5, bias=False), (4, 6)),
    "linear of sequences": (lambda: nn.Linear(6, 5), (4, 3, 6)),
    "linear of one": (lambda: nn.Linear(6, 5), (6,)),
    "bilinear": (lambda: _Twice(nn.Bilinear(6, 6, 5)), (4, 6)),
    "batch norm 1d": (lambda: nn.BatchNorm1d(6), (4, 6)),
    "batch norm of lines": (lambda: nn.BatchNorm1d(6), LINE),
    "batch norm 2d": (lambda: nn.BatchNorm2d(6), IMAGE),
    "batch norm 3d": (lambda: nn.BatchNorm3d(4), CUBE),
    "batch norm averaged": (lambda: nn.BatchNorm2d(6, momentum=None), IMAGE),
    "batch norm of the batch": (lambda: nn.BatchNorm2d(6, track_running_stats=False), IMAGE),
    "batch norm bare": (lambda: nn.BatchNorm2d(6, affine=False, momentum=0.3, eps=1e-2), IMAGE),
    "layer norm": (lambda: _scaled(nn.LayerNorm(6)), (4, 3, 6)),
    "layer norm of two": (lambda: _scaled(nn.LayerNorm((3, 6))), (4, 3, 6)),
    "layer norm no bias": (lambda: nn.LayerNorm(6, bias=False), (4, 6)),
    "layer norm bare": (lambda: nn.LayerNorm(6, elementwise_affine=False), (4, 6)),
    "rms norm": (lambda: _scaled(nn.RMSNorm(6)), (4, 3, 6)),
    "group norm": (lambda: _scaled(nn.GroupNorm(3, 6)), IMAGE),
    "group norm of rows": (lambda: _scaled(nn.GroupNorm(2, 6)), (4, 6)),
    "group norm bare": (lambda: nn.GroupNorm(2, 6, affine=False), IMAGE),
    "instance norm": (lambda: nn.InstanceNorm2d(6), IMAGE),
    "instance norm with all": (lambda: _scaled(nn.InstanceNorm2d(6, affine=True, track_running_stats=True)), IMAGE),
    "instance norm 1d": (lambda: nn.InstanceNorm1d(6, affine=True), LINE),
    "instance norm 3d": (lambda: nn.InstanceNorm3d(4, affine=True), CUBE),
    "local response norm": (lambda: nn.LocalResponseNorm(3), IMAGE),
    "prelu": (lambda: nn.PReLU(), IMAGE),
    "prelu of channels": (lambda: nn.PReLU(6), IMAGE),
    "prelu of rows": (lambda: nn.PReLU(6), (4, 6)),
    "max pool": (lambda: nn.MaxPool2d(3, stride=2, padding=1), IMAGE),
    "max pool 1d": (lambda: nn.MaxPool1d(2), LINE),
    "max pool 3d": (lambda: nn.MaxPool3d(2, ceil_mode=True), CUBE),
    "max pool with indices": (lambda: nn.MaxPool2d(2, return_indices=True), IMAGE),
    "average pool": (lambda: nn.AvgPool2d(2, count_include_pad=False, padding=1), IMAGE),
    "average pool 3d": (lambda: nn.AvgPool3d(2), CUBE),
    "adaptive pool": (lambda: nn.AdaptiveAvgPool2d((2, 3)), IMAGE),
    "adaptive max pool": (lambda: nn.AdaptiveMaxPool2d(2), IMAGE),
    "power pool": (lambda: nn.LPPool2d(2, 2), IMAGE),
    "upsample": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
    "padding": (lambda: nn.ReflectionPad2d(2), IMAGE),
    "flatten": (lambda: nn.Flatten(), IMAGE),
    "softmax": (lambda: nn.Softmax2d(), IMAGE),
    "attention": (lambda: _Self(nn.MultiheadAttention(6, 3)), (5, 4, 6)),
    "attention batch first": (
        lambda: _Self(nn.MultiheadAttention(6, 2, batch_first=True), need_weights=False), (4, 5, 6),
    ),
    "attention no bias": (lambda: _Self(nn.MultiheadAttention(6, 2, bias=False, add_bias_kv=True)), (4, 5, 6)),
    "attention masked": (lambda: _Self(nn.MultiheadAttention(6, 2, add_zero_attn=True), masked=True), (5, 4, 6)),
    "attention padded": (lambda: _Self(nn.MultiheadAttention(6, 2, batch_first=True), padded=True), (4, 5, 6)),
    "attention of one": (lambda: _Self(nn.MultiheadAttention(6, 2)), (5, 6)),
    "attention of other widths": (lambda: _Cross(nn.MultiheadAttention(6, 2, kdim=3, vdim=4)), (5, 4, 6)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0), (5, 4, 6)),
    "encoder layer norm first": (
        lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.0, "gelu", norm_first=True, batch_first=True), (4, 5, 6),
    ),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), 2), (4, 5, 6),
    ),
    "decoder layer": (lambda: _Twice(nn.TransformerDecoderLayer(6, 2, 8, dropout=0.0)), (5, 4, 6)),
    "transformer": (lambda: _Twice(nn.Transformer(6, 2, 1, 1, 8, dropout=0.0)), (5, 4, 6)),
    "lstm": (lambda: nn.LSTM(6, 3), (5, 4, 6)),
    "lstm with all": (lambda: nn.LSTM(6, 3, 2, batch_first=True, bidirectional=True), (4, 5, 6)),
    "lstm projected": (lambda: nn.LSTM(6, 4, proj_size=2, bias=False), (5, 4, 6)),
    "gru": (lambda: nn.GRU(6, 3, 2, batch_first=True), (4, 5, 6)),
    "gru both ways": (lambda: nn.GRU(6, 3, bidirectional=True), (5, 4, 6)),
    "rnn": (lambda: nn.RNN(6, 3, nonlinearity="relu"), (5, 4, 6)),
    "lstm cell": (lambda: nn.LSTMCell(6, 3), (4, 6)),
    "packed": (lambda: _Packed(nn.LSTM(6, 3, batch_first=True)), (4, 5, 6)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(6, 4, 3)), IMAGE),
    "older weight norm": (lambda: nn.utils.weight_norm(nn.Linear(6, 4)), (4, 6)),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)), (4, 6)),
    "called twice": (lambda: _Again(nn.Linear(6, 6)), (4, 6)),
    "pixel shuffle": (lambda: nn.Sequential(nn.Conv2d(6, 8, 1), nn.PixelShuffle(2)), IMAGE),
    "channel shuffle": (lambda: nn.Sequential(nn.Conv2d(6, 8, 1), nn.ChannelShuffle(2)), IMAGE),
    "own biases of attention": (lambda: _Biased(), (4, 2, 5, 6)),
    "tied": (lambda: _Tied(), (4, 6)),
    "pointwise chain": (
        lambda: nn.Sequential(nn.Conv1d(6, 8, 1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 4, 1), nn.BatchNorm1d(4)),
        LINE,
    ),
    "in place": (lambda: nn.Sequential(nn.Conv2d(6, 4, 1), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1)), IMAGE),
}
# fmt: on


class _Twice(nn.Module):
    """Calls a part with the same tensor for both of its arguments."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Any:
        return self.part(x, x * 0.5)


class _Self(nn.Module):
    def __init__(self, part: nn.Module, *, masked: bool = False, padded: bool = False, **settings: Any) -> None:
        super().__init__()
        self.part, self.masked, self.padded, self.settings = part, masked, padded, settings

    def forward(self, x: Tensor) -> Any:
        settings = dict(self.settings)
        length = x.shape[1] if self.part.batch_first else x.shape[0]  # type: ignore[union-attr]
        if self.masked:
            settings["attn_mask"] = torch.full((length, length), float("-inf"), dtype=x.dtype).triu(1)
        if self.padded:
            settings["key_padding_mask"] = torch.arange(length).expand(x.shape[0], -1) > 2
        return self.part(x, x, x, **settings)


class _Biased(nn.Module):
    """Learned biases on the scores: of all heads, of each, and of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.of_all, self.of_heads = nn.Parameter(torch.randn(5, 5)), nn.Parameter(torch.randn(2, 5, 5))

    def forward(self, x: Tensor) -> Any:
        of_samples = (x[:, :, :, :5] * self.of_all).detach()
        return [F.scaled_dot_product_attention(x, x, x, bias) for bias in (self.of_all, self.of_heads, of_samples)]


class _Cross(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Any:
        return self.part(x, x[..., :3], x[..., 2:])


class _Packed(nn.Module):
    """Sequences of different lengths, there and back."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Any:
        lengths = torch.arange(x.shape[0]) % 3 + 2
        packed = nn.utils.rnn.pack_padded_sequence(x * 2, lengths, batch_first=True, enforce_sorted=False)
        out, (h, _) = self.part(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
        return padded, h


class _Again(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.part(x).tanh())  # type: ignore[no-any-return]


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.there = nn.Linear(6, 3)
        self.back = nn.Linear(3, 6)
        self.back.weight = nn.Parameter(torch.randn(6, 3))
        self.again = nn.Linear(6, 3, bias=False)
        self.again.weight = self.there.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.back(self.there(x).relu())) + self.there.weight.sum(1)  # type: ignore[no-any-return]


def _scaled(module: nn.Module) -> nn.Module:
    """Norms begin with ones and zeros, which would not show whose they are."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, 1.0, 0.3)
    return module


def _batches(shape: tuple[int, ...], kind: str) -> tuple[Tensor, ...]:
    batch = common if kind == "shared" else own
    batches = [batch(*shape), batch(*shape, seed=8)]
    if len(shape) > 1 and shape[0] == 4:
        batches.append(batch(shape[0] - 1, *shape[1:], seed=9))  # a smaller last batch
    return tuple(batches)


@pytest.mark.parametrize("kind", ["shared", "own"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_every_formulation_of_a_convolution(name: str, kind: str) -> None:
    build, shape = CONVOLUTIONS[name]
    used = set()
    for formulation in convolution.FORMULATIONS:
        chooser = Preference({f.__name__: [formulation.name] for f in convolution.RULES})
        array = assert_equal_to_separate(built(build), *_batches(shape, kind), chooser=chooser)
        used |= {entry.how for entry in array.report.entries if entry.operation.startswith("conv")}
    expected = {"grouped", "branches"}
    if kind == "shared" and "groups" not in name and "depthwise" not in name:
        expected |= {"shared input"}
    if kind == "own" and name in ("1x1", "1x1 no bias", "1x1 stride", "valid", "1d pointwise"):
        expected |= {"batched matmul"}
    assert used == expected


@pytest.mark.parametrize("kind", ["shared", "own"])
@pytest.mark.parametrize("formulation", [one.name for one in linear.FORMULATIONS])
def test_every_formulation_of_a_linear_layer(formulation: str, kind: str) -> None:
    for bias in (True, False):
        variants = built(lambda bias=bias: nn.Linear(6, 5, bias=bias))  # type: ignore[misc]
        array = assert_equal_to_separate(
            variants, *_batches((4, 3, 6), kind), chooser=Preference({"linear": [formulation]})
        )
        if (formulation, kind) != ("shared input", "own"):
            assert array.report.how("") == formulation


@pytest.mark.parametrize("kind", ["shared", "own"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.filterwarnings("ignore")
def test_layers(name: str, kind: str) -> None:
    build, shape = LAYERS[name]
    variants = built(build)
    array = assert_equal_to_separate(variants, *_batches(shape, kind), separate=built(build))
    if name == "older weight norm":
        return  # cannot be copied any more
    array.eval()
    for variant in variants:
        variant.zero_grad()
    assert_equal_to_separate(variants, *_batches(shape, kind), array=array)
    for variant in variants:
        variant.zero_grad()
    with torch.no_grad():
        assert_equal_to_separate(variants, *_batches(shape, kind), array=array)


@pytest.mark.parametrize(
    "settings",
    [{}, {"padding_idx": 3}, {"padding_idx": -1}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}],
    ids=str,
)
@pytest.mark.parametrize("kind", ["shared", "own"])
def test_embeddings(settings: dict[str, Any], kind: str) -> None:
    from pl_pipe.tensors.arrays import mark

    tokens = torch.randint(0, 9, (4, 5), generator=torch.Generator().manual_seed(1))
    if kind == "own":
        tokens = mark(torch.stack([tokens, tokens.flip(0), 8 - tokens]))
    variants = built(lambda: nn.Embedding(9, 6, **settings))
    array = assert_equal_to_separate(variants, tokens, tokens)
    assert array.report.how("") == "offset indices"


def test_embedding_bags_and_sparse_gradients() -> None:
    tokens = torch.randint(0, 9, (4, 5))
    array = assert_equal_to_separate(built(lambda: nn.EmbeddingBag(9, 6)), tokens)
    assert array.report.unfused
    with pytest.raises(FusionError, match="sparse=True"):
        VariantArray(built(lambda: nn.Embedding(9, 6, sparse=True)))(tokens)


@pytest.mark.parametrize("clear", [None, True, False])
def test_sparse_gradients_of_a_part_that_runs_once_a_variant(clear: bool | None) -> None:
    """Of one batch, of several, and where the optimizer leaves gradients of zero."""
    tokens = torch.tensor([[1, 2, 2], [7, 1, 0]])
    variants, separate = (
        built(lambda: nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Linear(6, 2))) for _ in range(2)
    )
    array = VariantArray(variants, fuse_except=["0"])
    for step in range(6):
        given = tokens + step % 2
        torch.stack([out.square().mean() for out in array(given)]).sum().backward()
        for mine, alone in zip(variants, separate, strict=True):
            alone(given).square().mean().backward()
            assert mine[0].weight.grad.is_sparse
            assert_close(mine[0].weight.grad.to_dense(), alone[0].weight.grad.to_dense())
            for module in (mine, alone):
                optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
                if step % 2:
                    optimizer.step()
                if clear is not None and step % 2:
                    optimizer.zero_grad(set_to_none=clear)
            assert_close(dict(mine.named_parameters()), dict(alone.named_parameters()))


def test_a_sparse_embedding_without_gradients_is_one_like_any_other() -> None:
    tokens = torch.tensor([[1, 2, 2], [7, 1, 0]])
    frozen = built(lambda: nn.Embedding(9, 6, sparse=True).requires_grad_(False))
    array = VariantArray(frozen)
    for found, alone in zip(array(tokens), frozen, strict=True):
        assert_close(found, alone(tokens))
    assert array.report.how("") == "offset indices"


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.1}, {"ignore_index": 1}, {"weight": True}], ids=str)
def test_cross_entropy_inside_a_forward(reduction: str, settings: dict[str, Any]) -> None:
    settings = dict(settings)
    if settings.get("weight"):
        settings["weight"] = torch.rand(5, dtype=torch.float64)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(6, 5)

        def forward(self, x: Tensor, y: Tensor) -> Any:
            scores = self.part(x)
            sequences = F.cross_entropy(scores.unflatten(0, (2, 2)).transpose(1, 2), y.view(2, 2), reduction=reduction)
            soft = F.cross_entropy(scores, x[:, :5].softmax(1), reduction=reduction)
            return F.cross_entropy(scores, y, reduction=reduction, **settings), sequences, soft

    y = torch.tensor([0, 1, 4, 2])
    assert_equal_to_separate(built(Net), (common(4, 6), y), (own(4, 6), y))


def test_bf16_autocast_gives_what_separate_modules_give() -> None:
    """Types equal those of a separate run; numbers up to bf16's rounding of sums in another order."""
    build: Callable[[], nn.Module] = lambda: nn.Sequential(  # noqa: E731
        *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4), nn.Flatten()),
        *(nn.Linear(144, 8), nn.LayerNorm(8), nn.Unflatten(1, (2, 4))),
        *(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), nn.PReLU()),
    )
    variants = built(build, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equal_to_separate(variants, common(4, 3, 8, 8).float(), tolerance=0.05)
