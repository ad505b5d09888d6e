"""Graph classification with torch_geometric's GIN convolutions and loader (PyG's Lightning example)."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.data.lightning import LightningDataset
from torch_geometric.nn import MLP, GINConv, global_add_pool
from torchmetrics import Accuracy

pl.seed_everything(19)


class Model(pl.LightningModule):
    def __init__(self, in_channels, out_channels, hidden_channels=16, num_layers=3, dropout=0.3):
        super().__init__()
        self.convs = torch.nn.ModuleList()
        for _ in range(num_layers):
            self.convs.append(GINConv(MLP([in_channels, hidden_channels, hidden_channels]), train_eps=False))
            in_channels = hidden_channels
        self.classifier = MLP([hidden_channels, hidden_channels, out_channels], norm="batch_norm", dropout=dropout)
        self.train_acc = Accuracy(task="multiclass", num_classes=out_channels)
        self.val_acc = Accuracy(task="multiclass", num_classes=out_channels)
        self.test_acc = Accuracy(task="multiclass", num_classes=out_channels)

    def forward(self, x, edge_index, batch):
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        x = global_add_pool(x, batch)
        return self.classifier(x)

    def training_step(self, data, batch_idx):
        y_hat = self(data.x, data.edge_index, data.batch)
        loss = F.cross_entropy(y_hat, data.y)
        self.train_acc(y_hat.softmax(dim=-1), data.y)
        self.log("train_acc", self.train_acc, prog_bar=True, on_step=False, on_epoch=True, batch_size=y_hat.size(0))
        return loss

    def validation_step(self, data, batch_idx):
        y_hat = self(data.x, data.edge_index, data.batch)
        self.val_acc(y_hat.softmax(dim=-1), data.y)
        self.log("val_acc", self.val_acc, prog_bar=True, on_step=False, on_epoch=True, batch_size=y_hat.size(0))

    def test_step(self, data, batch_idx):
        y_hat = self(data.x, data.edge_index, data.batch)
        self.test_acc(y_hat.softmax(dim=-1), data.y)
        self.log("test_acc", self.test_acc, prog_bar=True, on_step=False, on_epoch=True, batch_size=y_hat.size(0))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def make_graph(label):
    n = int(torch.randint(5, 10, (1,)))
    edges = torch.randint(0, n, (2, n * (1 + 2 * label)))
    return Data(x=torch.randn(n, 5), edge_index=edges, y=torch.tensor([label]))


graphs = [make_graph(i % 2) for i in range(96)]
datamodule = LightningDataset(graphs[:64], graphs[64:80], graphs[80:], batch_size=8, num_workers=0)
model = Model(in_channels=5, out_channels=2)
checkpoint = pl.callbacks.ModelCheckpoint(monitor="val_acc", save_top_k=1, mode="max")
trainer = pl.Trainer(max_epochs=2, log_every_n_steps=5, callbacks=[checkpoint])
trainer.fit(model, datamodule)
results = trainer.test(ckpt_path="best", datamodule=datamodule)
