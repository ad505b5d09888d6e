"""DCGAN: the published networks, its step against a plain loop, fakes that are fakes, and images from disk."""

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pl_pipe.errors import ConfigError, DataError
from pl_pipe.recipes.generative.datamodule import scrambled
from pl_pipe.recipes.generative.dcgan import Dcgan
from pl_pipe.recipes.generative.distance import sliced_distance
from pl_pipe.recipes.generative.drawings import DrawingsData, draw
from pl_pipe.recipes.generative.image_files import ImageFilesData
from pl_pipe.recipes.generative.networks import Discriminator, Generator
from tests.conftest import image_folder


def test_the_published_networks() -> None:
    """64 pixels: 2.77 million parameters to judge and 3.58 million to generate, layer by layer as published."""
    with torch.device("meta"):
        generator, discriminator = Generator(64), Discriminator(64)
        images = generator(torch.empty(128, 100))
        assert images.shape == (128, 3, 64, 64)
        assert discriminator(images).shape == (128,)
    shapes = [tuple(m.weight.shape) for m in discriminator.modules() if isinstance(m, nn.Conv2d)]
    assert shapes == [(64, 3, 4, 4), (128, 64, 4, 4), (256, 128, 4, 4), (512, 256, 4, 4), (1, 512, 4, 4)]
    shapes = [tuple(m.weight.shape) for m in generator.modules() if isinstance(m, nn.ConvTranspose2d)]
    assert shapes == [(100, 512, 4, 4), (512, 256, 4, 4), (256, 128, 4, 4), (128, 64, 4, 4), (64, 3, 4, 4)]
    counts = [sum(p.numel() for p in network.parameters()) for network in (discriminator, generator)]
    assert counts == [2_765_568, 3_576_704]
    norms = [m.num_features for m in discriminator.modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms == [128, 256, 512]


@pytest.mark.parametrize("size", [16, 32, 128])
def test_other_sizes(size: int) -> None:
    images = Generator(size, latent=5, width=0.05)(torch.randn(2, 5))
    assert images.shape == (2, 3, size, size)
    assert images.abs().max() <= 1
    assert Discriminator(size, width=0.05)(images).shape == (2,)


@pytest.mark.parametrize("size", [8, 48, 65])
def test_sizes_that_do_not_double_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=rf"data.image_size={size}, but DCGAN doubles from 4 pixels up"):
        Discriminator(size)


def test_a_step_is_the_plain_loop(tmp_path: Path) -> None:
    """The discriminator first, on real and generated images; then the generator against the new discriminator."""
    torch.manual_seed(0)
    model = Dcgan(image_size=16, latent=6, width=0.1)
    plain = copy.deepcopy(model)
    real = draw(20, side=16, seed=0)
    noises = [torch.randn(count, 6) for count in (8, 8, 4)]
    waiting = iter(noises)
    model._noise = lambda count: next(waiting)  # type: ignore[method-assign]
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(model, DataLoader(TensorDataset(real), batch_size=8))
    generator, discriminator = plain.generator.train(), plain.discriminator.train()
    generating = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    discriminating = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    for images, noise in zip(real.split(8), noises, strict=True):
        fake = generator(noise)
        loss = -F.logsigmoid(discriminator(images)).mean() - F.logsigmoid(-discriminator(fake.detach())).mean()
        discriminating.zero_grad()
        loss.backward()
        discriminating.step()
        generating.zero_grad()
        (-F.logsigmoid(discriminator(fake)).mean()).backward()
        generating.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name)
    with Image.open(tmp_path / "images" / "epoch_000.png") as sheet:
        assert sheet.size == (8 * 18 + 2, 8 * 18 + 2)  # 64 images of 16 pixels, 2 between them


def test_images_are_written_in_evaluation_mode_and_leave_training_as_it_was(tmp_path: Path) -> None:
    model = Dcgan(image_size=16, latent=6, width=0.1).train()
    before = copy.deepcopy(model.state_dict())
    model.write_images(tmp_path / "new" / "sheet.png")
    assert model.generator.training
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["sheet.png"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_distance_is_that_of_sorted_values() -> None:
    torch.manual_seed(0)
    images, others = torch.randn(2, 30, 3, 16, 16)
    assert float(sliced_distance(images, images[torch.randperm(30)])) == pytest.approx(0, abs=1e-6)
    shifted = sliced_distance(images, images + 1)
    # A shift moves every direction by its own sum; the root mean square over directions is the mean length, 1.
    assert 0.5 < float(shifted) < 2
    assert float(sliced_distance(images, others)) < float(shifted)
    with pytest.raises(ValueError, match="cannot be compared"):
        sliced_distance(images, others[:5])


def test_fakes_have_the_same_tiles_elsewhere() -> None:
    image = torch.arange(3 * 16 * 16, dtype=torch.float32).view(3, 16, 16)
    fake = scrambled(image, torch.Generator().manual_seed(1))

    def tiles(picture: torch.Tensor) -> set[bytes]:
        cut = [row.split(4, dim=2) for row in picture.split(4, dim=1)]
        return {tile.contiguous().numpy().tobytes() for row in cut for tile in row}

    assert tiles(fake) == tiles(image)
    assert not torch.equal(fake, image)


def test_drawings_with_and_without_fakes() -> None:
    data = DrawingsData(image_size=16, batch_size=6, num_samples=12, num_val_samples=4, fakes=True)
    data.setup("fit")
    images, is_real = next(iter(data.val_dataloader()))
    assert images.shape == (4, 3, 16, 16)
    assert is_real.tolist() == [1, 0, 1, 0]
    assert images.abs().max() <= 1
    originals = draw(4, side=16, seed=1)
    assert torch.equal(images[0], originals[0])
    assert not torch.equal(images[1], originals[1])
    plain = DrawingsData(image_size=16, batch_size=6, num_samples=12, num_val_samples=4)
    plain.setup("fit")
    (only,) = next(iter(plain.val_dataloader()))
    assert torch.equal(only, originals)
    assert not torch.equal(draw(4, side=16, seed=2), originals)


def test_images_from_disk_are_split_once(tmp_path: Path) -> None:
    image_folder(tmp_path, splits=("a", "b"), classes=2, images=5, size=40)
    Image.new("L", (30, 60)).save(tmp_path / "grey.png")
    data = ImageFilesData(root=str(tmp_path), image_size=16, batch_size=4, val_fraction=0.2)
    data.setup("fit")
    train, val = (set(part.paths) for part in (data.train_set, data.val_set))  # type: ignore[attr-defined]
    assert (len(train), len(val), train & val) == (17, 4, set())
    images = torch.cat([batch[0] for batch in data.train_dataloader()])
    assert images.shape[1:] == (3, 16, 16)
    assert -1 <= images.min() < 0 < images.max() <= 1


def test_bad_images_and_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data=image_files reads files from disk"):
        ImageFilesData(root=None)
    for name in ("a.jpg", "b.jpg"):
        (tmp_path / name).write_bytes(b"no image")
    with pytest.raises(DataError, match=r"holds 2 images .*; at least 3 are needed"):
        ImageFilesData(root=str(tmp_path))
    (tmp_path / "c.jpg").write_bytes(b"no image")
    data = ImageFilesData(root=str(tmp_path), image_size=16)
    data.setup("fit")
    with pytest.raises(DataError, match=r"\.jpg cannot be read as an image"):
        data.train_set[0]
    wrong: list[dict[str, Any]] = [{"width": 0.0}, {"lr": 0.0}, {"beta1": 1.0}, {"latent": 0}]
    for settings in wrong:
        with pytest.raises(ConfigError, match=rf"recipe.{next(iter(settings))}="):
            Dcgan(image_size=16, **settings)
    with pytest.raises(ConfigError, match=r"data.image_size=18 does not divide into 4 tiles"):
        DrawingsData(image_size=18, fakes=True)
