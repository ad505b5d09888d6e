"""Message passing with plain torch (index_add_) on batched graphs in a dataclass (molecule regression code)."""

from dataclasses import dataclass

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

L.seed_everything(36)


@dataclass
class Graph:
    x: Tensor
    edge_index: Tensor
    y: Tensor


@dataclass
class GraphBatch:
    x: Tensor
    edge_index: Tensor
    batch: Tensor
    y: Tensor
    num_graphs: int


def random_graph():
    n = int(torch.randint(4, 9, (1,)))
    x = torch.randn(n, 6)
    edges = torch.randint(0, n, (2, 2 * n))
    y = x[edges[0]].mul(x[edges[1]]).sum() / n
    return Graph(x, edges, y)


def collate(graphs):
    xs, edges, owner, offset = [], [], [], 0
    for i, g in enumerate(graphs):
        xs.append(g.x)
        edges.append(g.edge_index + offset)
        owner.append(torch.full((len(g.x),), i))
        offset += len(g.x)
    ys = torch.stack([g.y for g in graphs])
    return GraphBatch(torch.cat(xs), torch.cat(edges, dim=1), torch.cat(owner), ys, len(graphs))


class MessagePassing(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * dim, dim), nn.SiLU())
        self.update = nn.Sequential(nn.Linear(2 * dim, dim), nn.SiLU())

    def forward(self, x, edge_index):
        src, dst = edge_index
        messages = self.message(torch.cat([x[src], x[dst]], dim=-1))
        gathered = torch.zeros_like(x).index_add_(0, dst, messages)
        return x + self.update(torch.cat([x, gathered], dim=-1))


class GNN(L.LightningModule):
    def __init__(self, dim=16, depth=3):
        super().__init__()
        self.embed = nn.Linear(6, dim)
        self.layers = nn.ModuleList(MessagePassing(dim) for _ in range(depth))
        self.readout = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, 1))

    def forward(self, data):
        x = self.embed(data.x)
        for layer in self.layers:
            x = layer(x, data.edge_index)
        pooled = x.new_zeros(data.num_graphs, x.shape[1]).index_add_(0, data.batch, x)
        return self.readout(pooled).squeeze(-1)

    def training_step(self, data, batch_idx):
        loss = nn.functional.l1_loss(self(data), data.y)
        self.log("train_mae", loss, batch_size=data.num_graphs, prog_bar=True)
        return loss

    def validation_step(self, data, batch_idx):
        self.log("val_mae", nn.functional.l1_loss(self(data), data.y), batch_size=data.num_graphs)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3, amsgrad=True)


train = DataLoader([random_graph() for _ in range(64)], batch_size=8, shuffle=True, collate_fn=collate)
val = DataLoader([random_graph() for _ in range(16)], batch_size=8, collate_fn=collate)
model = GNN()
trainer = L.Trainer(max_epochs=2, log_every_n_steps=2)
trainer.fit(model, train, val)
results = trainer.validate(model, val)
