"""DCGAN: a generator and a discriminator that train against each other, each with an optimizer of its own.

Lightning calls this manual optimization: the step itself runs backward and the optimizers. Strategies that place one
step over several ranks cannot do that; `single` and `ddp` can.
"""

from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.utils import save_image
from typing_extensions import override

from pl_pipe.errors import ConfigError

from .distance import sliced_distance
from .networks import Discriminator, Generator
from .real_fake import check_settings

SHOWN = 64
SHOWN_SEED = 7


class Dcgan(L.LightningModule):
    """Trains both networks; writes a sheet of generated images at the end of every epoch.

    `val_distance` compares generated images with real ones (see distance.py): losses of a GAN say nothing of quality.
    """

    def __init__(
        self,
        image_size: int,
        latent: int = 100,
        width: float = 1.0,
        channels: int = 3,
        lr: float = 2e-4,
        beta1: float = 0.5,
    ) -> None:
        super().__init__()
        check_settings(width=width, lr=lr, beta1=beta1)
        if latent < 1:
            raise ConfigError(f"recipe.latent={latent} is too small; the least is 1")
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = Generator(image_size, latent=latent, width=width, channels=channels)
        self.discriminator = Discriminator(image_size, width=width, channels=channels)

    @override
    def forward(self, noise: Tensor) -> Tensor:
        images: Tensor = self.generator(noise)
        return images

    @override
    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        real = batch[0]
        generating, discriminating = self.optimizers()  # type: ignore[attr-defined]
        fake = self(self._noise(len(real)))

        self.toggle_optimizer(discriminating)
        wrong_on_real = _judged(self.discriminator(real), real=True)
        wrong_on_fake = _judged(self.discriminator(fake.detach()), real=False)
        discriminator_loss = wrong_on_real + wrong_on_fake
        discriminating.zero_grad()
        self.manual_backward(discriminator_loss)
        discriminating.step()
        self.untoggle_optimizer(discriminating)

        self.toggle_optimizer(generating)
        generator_loss = _judged(self.discriminator(fake), real=True)
        generating.zero_grad()
        self.manual_backward(generator_loss)
        generating.step()
        self.untoggle_optimizer(generating)

        self.log("d_loss", discriminator_loss.detach(), prog_bar=True)
        self.log("g_loss", generator_loss.detach(), prog_bar=True)

    @override
    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        self.log("val_distance", self._distance(batch[0], batch_idx), prog_bar=True, sync_dist=True)

    @override
    def test_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        self.log("test_distance", self._distance(batch[0], batch_idx), sync_dist=True)

    @override
    def predict_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> dict[str, Tensor]:
        return {"images": self(self._fixed_noise(len(batch[0]), batch_idx))}

    @override
    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.write_images(Path(self.trainer.default_root_dir) / "images" / f"epoch_{self.current_epoch:03d}.png")

    def write_images(self, path: Path) -> None:
        """A sheet of 8 × 8 images from noise that is always the same, so that sheets of two epochs compare."""
        path.parent.mkdir(parents=True, exist_ok=True)
        training = self.generator.training
        self.generator.eval()
        with torch.no_grad():
            images = self(self._fixed_noise(SHOWN, SHOWN_SEED))
        self.generator.train(training)
        part = path.with_suffix(".part")
        save_image(images, part, format="png", nrow=8, normalize=True, value_range=(-1, 1))
        part.replace(path)

    @override
    def configure_optimizers(self) -> Any:
        h = self.hparams
        settings = {"lr": h["lr"], "betas": (h["beta1"], 0.999)}
        return [torch.optim.Adam(part.parameters(), **settings) for part in (self.generator, self.discriminator)]

    def _distance(self, real: Tensor, batch_idx: int) -> Tensor:
        return sliced_distance(self(self._fixed_noise(len(real), batch_idx)), real)

    def _noise(self, count: int) -> Tensor:
        return torch.randn(count, self.hparams["latent"], device=self.device)

    def _fixed_noise(self, count: int, seed: int) -> Tensor:
        """Drawn on the CPU, so that it is the same on every device."""
        random = torch.Generator().manual_seed(seed)
        return torch.randn(count, self.hparams["latent"], generator=random).to(self.device)


def _judged(logits: Tensor, *, real: bool) -> Tensor:
    wanted = torch.ones_like(logits) if real else torch.zeros_like(logits)
    return F.binary_cross_entropy_with_logits(logits, wanted)
