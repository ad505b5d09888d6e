"""Small networks of the kinds that fusion is for, beside torchvision's."""

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn


def without_dropout(model: nn.Module) -> nn.Module:
    """Masks of separate runs are other masks; numbers can be compared without them."""
    for module in model.modules():
        if isinstance(module, nn.Dropout) or type(module).__name__ == "StochasticDepth":
            module.p = 0.0  # type: ignore[assignment]
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


def vision(name: str, **settings: object) -> nn.Module:
    return without_dropout(torchvision.models.get_model(name, num_classes=10, **settings))


def small_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=10
    )


def small_swin() -> nn.Module:
    return torchvision.models.SwinTransformer(
        patch_size=[2, 2], embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=[5, 5], num_classes=10,
        stochastic_depth_prob=0.0,
    )  # fmt: skip


def small_convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    blocks = [CNBlockConfig(8, 16, 2), CNBlockConfig(16, None, 1)]
    return ConvNeXt(blocks, stochastic_depth_prob=0.0, num_classes=10)


class LanguageModel(nn.Module):
    """A causal transformer whose output weights are its embedding's."""

    def __init__(self, tokens: int = 20, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width, padding_idx=0)
        self.register_buffer("positions", torch.arange(64))
        self.position = nn.Embedding(64, width)
        layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        h = self.embedding(tokens) + self.position(self.positions[:length])
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=h.device, dtype=h.dtype)
        h = self.norm(self.encoder(h, mask=mask, is_causal=True))
        return F.linear(h, self.embedding.weight)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.rnn = nn.LSTM(6, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(10, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        out, (h, _) = self.rnn(self.embedding(tokens))
        return self.out(out + h[-1].repeat(1, 2).unsqueeze(1))  # type: ignore[no-any-return]


class PointNet(nn.Module):
    """1×1 convolutions over points, a maximum over all of them, and a learned transform of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.ReLU())
        self.to_matrix = nn.Linear(8, 9)
        self.features = nn.Sequential(
            nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 16, 1), nn.BatchNorm1d(16)
        )
        self.out = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 10))

    def forward(self, points: Tensor) -> Tensor:
        matrix = self.to_matrix(torch.max(self.transform(points), 2)[0]).view(-1, 3, 3)
        matrix = matrix + torch.eye(3, dtype=matrix.dtype)
        moved = torch.bmm(points.transpose(2, 1), matrix).transpose(2, 1)
        h = torch.max(self.features(moved), 2, keepdim=True)[0].view(-1, 16)
        return F.log_softmax(self.out(h), dim=-1)


class Discriminator(nn.Module):
    """DCGAN's."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            *(nn.Conv2d(3, 4, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)),
            *(nn.Conv2d(4, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.2, inplace=True)),
            *(nn.Conv2d(8, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.LeakyReLU(0.2, inplace=True)),
            nn.Conv2d(16, 10, 4, 1, 0, bias=False),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.main(images).view(images.shape[0], -1)  # type: ignore[no-any-return]


class Residual(nn.Module):
    """Small, with a bit of everything that convolutional networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.scale = nn.Parameter(torch.ones(1) * 0.5)
        self.out = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.stem(x)))
        h = h + self.scale * self.block(h)
        return self.out(F.adaptive_avg_pool2d(h, 1).flatten(1))  # type: ignore[no-any-return]
