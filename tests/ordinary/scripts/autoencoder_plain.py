"""The plainest autoencoder: fit, then save_checkpoint (Lightning's "15 minutes" page)."""

import lightning as L
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(42)

# define any number of nn.Modules (or use your current ones)
encoder = nn.Sequential(nn.Linear(28 * 28, 32), nn.ReLU(), nn.Linear(32, 3))
decoder = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 28 * 28))


# define the LightningModule
class LitAutoEncoder(L.LightningModule):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def training_step(self, batch, batch_idx):
        # training_step defines the train loop.
        # it is independent of forward
        x, _ = batch
        x = x.view(x.size(0), -1)
        z = self.encoder(x)
        x_hat = self.decoder(z)
        loss = nn.functional.mse_loss(x_hat, x)
        # Logging to TensorBoard (if installed) by default
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return optim.Adam(self.parameters(), lr=1e-3)


# init the autoencoder
autoencoder = LitAutoEncoder(encoder, decoder)

# setup data
dataset = TensorDataset(torch.rand(96, 1, 28, 28), torch.randint(0, 10, (96,)))
train_loader = DataLoader(dataset, batch_size=12, shuffle=True)

# train the model (hint: here are some helpful Trainer arguments for rapid idea iteration)
trainer = L.Trainer(limit_train_batches=100, max_epochs=2)
trainer.fit(model=autoencoder, train_dataloaders=train_loader)
trainer.save_checkpoint("autoencoder.ckpt")

# load checkpoint
autoencoder = LitAutoEncoder.load_from_checkpoint("autoencoder.ckpt", encoder=encoder, decoder=decoder)

# choose your trained nn.Module
encoder = autoencoder.encoder
encoder.eval()

# embed 4 fake images!
fake_image_batch = torch.rand(4, 28 * 28, device=autoencoder.device)
result_embeddings = encoder(fake_image_batch).detach()
result_loss = trainer.callback_metrics["train_loss"]
