"""torch.compile on the feature extractor inside the module (users who only compile the hot part)."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(47)


class Features(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.fc1 = nn.Linear(16, width)
        self.fc2 = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        h = F.gelu(self.fc1(x))
        return self.norm(h + F.gelu(self.fc2(h)))


class CompiledClassifier(L.LightningModule):
    def __init__(self, compile_features=True):
        super().__init__()
        self.save_hyperparameters()
        self.features = Features()
        if compile_features:
            self.features = torch.compile(self.features, backend="aot_eager")
        self.hidden = nn.Linear(24, 24)
        self.classifier = nn.Linear(24, 3)

    def forward(self, x):
        return self.classifier(torch.relu(self.hidden(self.features(x))))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


x, y = torch.randn(96, 16), torch.randint(0, 3, (96,))
train = DataLoader(TensorDataset(x[:64], y[:64]), batch_size=8, shuffle=True, drop_last=True)
val = DataLoader(TensorDataset(x[64:], y[64:]), batch_size=8)
model = CompiledClassifier()
trainer = L.Trainer(max_epochs=2, log_every_n_steps=4)
trainer.fit(model, train, val)
results = trainer.validate(model, val)
result_keys = list(model.state_dict())
