"""Transfer learning with a frozen torchvision backbone put in eval() (Lightning's "Transfer Learning" page)."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy
from torchvision import models

L.seed_everything(1234)


class ImagenetTransferLearning(L.LightningModule):
    def __init__(self, num_target_classes=5):
        super().__init__()
        # init a pretrained resnet
        backbone = models.resnet18(weights=None)
        num_filters = backbone.fc.in_features
        layers = list(backbone.children())[:-1]
        self.feature_extractor = nn.Sequential(*layers)
        self.feature_extractor.eval()
        for param in self.feature_extractor.parameters():
            param.requires_grad = False

        # use the pretrained model to classify (5 image classes)
        self.classifier = nn.Sequential(nn.Linear(num_filters, 32), nn.ReLU(), nn.Linear(32, num_target_classes))
        self.accuracy = Accuracy(task="multiclass", num_classes=num_target_classes)

    def forward(self, x):
        self.feature_extractor.eval()
        with torch.no_grad():
            representations = self.feature_extractor(x).flatten(1)
        return self.classifier(representations)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.log_dict({"val_loss": F.cross_entropy(logits, y), "val_acc": self.accuracy})

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).argmax(dim=-1)

    def configure_optimizers(self):
        return torch.optim.Adam(filter(lambda p: p.requires_grad, self.parameters()), lr=1e-3)


def make_loader(n, shuffle=False):
    images = torch.randn(n, 3, 32, 32)
    labels = torch.randint(0, 5, (n,))
    return DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=shuffle)


train_loader, val_loader = make_loader(48, shuffle=True), make_loader(16)
model = ImagenetTransferLearning()
trainer = L.Trainer(max_epochs=2, log_every_n_steps=1)
trainer.fit(model, train_loader, val_loader)
result_metrics = {k: v.item() for k, v in trainer.callback_metrics.items()}

# predict on your data of interest
model.freeze()
result_predictions = trainer.predict(model, val_loader)
