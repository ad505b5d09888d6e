"""example_input_array, ModelSummary with sizes in and out, the graph logged, TorchScript and ONNX-free export."""

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.model_summary import summarize
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(511)


class Sketch(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.example_input_array = torch.zeros(2, 1, 12, 12)
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU()
        )
        self.flatten = nn.Flatten()
        self.classifier = nn.Sequential(nn.Linear(144, 24), nn.ReLU(), nn.Linear(24, 5))

    def forward(self, x):
        return self.classifier(self.flatten(self.encoder(x)))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.RAdam(self.parameters(), lr=3e-3)


model = Sketch()
summary = summarize(model, max_depth=2)
result_total = summary.total_parameters
result_trainable = summary.trainable_parameters
result_layers = {name: str(size) for name, size in zip(summary.layer_names, summary.out_sizes, strict=True)}

data = TensorDataset(torch.randn(64, 1, 12, 12), torch.randint(0, 5, (64,)))
trainer = L.Trainer(
    max_epochs=2,
    callbacks=[ModelSummary(max_depth=-1)],
    logger=TensorBoardLogger("tb_logs", name="sketch", log_graph=False),
    log_every_n_steps=2,
)
trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True))
model.eval()
traced = model.to_torchscript(method="trace")
if trainer.is_global_zero:
    torch.jit.save(traced, "sketch.pt")
trainer.strategy.barrier()
result_traced = torch.jit.load("sketch.pt")(torch.ones(1, 1, 12, 12)).detach()
result_loss = trainer.callback_metrics["train_loss"].item()
