"""Moving averages of weights as repositories keep them: a deep copy of the module, a helper object with a list."""

import copy

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(31)


class CopiedModel(Callback):
    """As in timm: the averaged model is a copy of the model."""

    def __init__(self, decay=0.9):
        self.decay = decay
        self.batches = 0

    def on_fit_start(self, trainer, pl_module):
        self.ema = copy.deepcopy(pl_module).eval().requires_grad_(False)

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches += 1
        for averaged, current in zip(self.ema.state_dict().values(), pl_module.state_dict().values(), strict=True):
            averaged.copy_(averaged * self.decay + current.detach() * (1.0 - self.decay))

    def on_train_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            torch.save(self.ema.state_dict(), "ema.pt")

    def state_dict(self):
        return {name: value for name, value in self.__dict__.items() if name != "ema" and "log" not in name}


class ShadowWeights:
    """As in torch_ema: a list of tensors, updated at once; and a copy of the model to put them into."""

    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = [parameter.detach().clone() for parameter in model.parameters()]
        self.start = copy.deepcopy(model)

    @torch.no_grad()
    def update(self, parameters):
        torch._foreach_lerp_(self.shadow, [parameter.detach() for parameter in parameters], 1.0 - self.decay)


class ShadowCallback(Callback):
    def on_train_start(self, trainer, pl_module):
        self.weights = ShadowWeights(pl_module, 0.8)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        torch._foreach_mul_([p.grad for p in pl_module.parameters() if p.grad is not None], 0.5)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.weights.update(pl_module.parameters())


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16), nn.GELU())
        self.head = nn.Linear(16, 3)
        self.register_buffer("seen", torch.zeros(3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.head(self.body(x)), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


data = TensorDataset(torch.randn(48, 10), torch.randint(0, 3, (48,)))
model, copied, shadow = Classifier(), CopiedModel(), ShadowCallback()
trainer = L.Trainer(max_epochs=2, callbacks=[copied, shadow])
trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True))
trainer.save_checkpoint("with_state.ckpt")

averaged, start = copied.ema, shadow.weights.start
result_shadow = [float(tensor.norm()) for tensor in shadow.weights.shadow]
if trainer.is_global_zero:
    result_saved = torch.load("ema.pt")
