"""Ways in which people hold Lightning that are no script of their own: old names, the command line, mistakes."""

import importlib.util
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from ordinary.runner import differences
from pipedream_farm import Farm, Order

from pl_pipe.runtime.micro_batches import split
from pl_pipe.strategies.pipeline.loss_comparison import warn_of_other_loss
from pl_pipe.strategies.pipeline.plan_choice import choose_plan

pytest_plugins = "pipedream_plugin"

HEAD = """
import lightning as L, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import torch.nn.functional as F
L.seed_everything(1)

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.after(loss)
        return loss
    def after(self, loss): pass
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = DataLoader(TensorDataset(torch.randn(16, 4), torch.randint(0, 3, (16,))), batch_size=8)
"""


def run(farm: Farm, tmp_path: Path, text: str, *, strategy: str = "1f1b", ranks: int = 2) -> list[dict[str, Any]]:
    path = tmp_path / "script.py"
    path.write_text(HEAD + text)
    return farm.start(Order("ordinary.runner.run", ranks=ranks, script=str(path), strategy=strategy)).results


FIRST = "import pytorch_lightning as pl; import pl_pipe"
AFTER = "import pl_pipe; import pytorch_lightning as pl"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (f"{AFTER}; print(type(pl.Trainer(strategy='pipedream', accelerator='cpu').strategy))", "PipeDreamStrategy"),
        (f"{AFTER}; import lightning.pytorch as L; print(pl is L)", "True"),
        (f"{FIRST}; pl.Trainer(strategy='pipedream', accelerator='cpu')", "put `import pl_pipe` above it"),
        (
            f"{FIRST}; from pl_pipe.strategies import PipeDreamStrategy; "
            "pl.Trainer(strategy=PipeDreamStrategy(), accelerator='cpu')",
            "put `import pl_pipe` above it",
        ),
        (
            "import pl_pipe; from lightning.fabric import Fabric; Fabric(strategy='pipedream', accelerator='cpu')",
            "Fabric has loops of its own",
        ),
    ],
)
def test_the_old_name_works_or_says_what_to_change(code: str, words: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert words in done.stdout + done.stderr


@pytest.mark.skipif(importlib.util.find_spec("jsonargparse") is None, reason="LightningCLI needs jsonargparse")
@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("PipeDreamStrategy", "schedule=1f1b"),
        ("AutoStrategy", "schedule=gpipe"),
        ("AdaptiveCommStrategy", "piece_mb=1.0"),
        ("PartialReduceStrategy", "synchronizer=partial_reduce"),
        ("FusionStrategy", "seeds=[1,2]"),
    ],
)
def test_the_lightning_cli_makes_strategies(name: str, option: str) -> None:
    from lightning.pytorch.cli import LightningCLI

    given = ["--trainer.accelerator=cpu", "--trainer.devices=1", f"--trainer.strategy=pl_pipe.strategies.{name}"]
    cli = LightningCLI(BoringModel, BoringDataModule, run=False, args=[*given, f"--trainer.strategy.{option}"])
    assert type(cli.trainer.strategy).__name__ == name


def test_a_wrong_log_names_the_users_line(farm: Farm, tmp_path: Path) -> None:
    text = """
class Logs(Net):
    def after(self, loss):
        self.log("loss", loss, reduce_fx="nonsense")
L.Trainer(max_epochs=1).fit(Logs(), data)
"""
    found = run(farm, tmp_path, text)
    assert re.search(r"script\.py:\d+: .*nonsense", found[0]["error"])


def test_one_rank_that_asks_alone_is_told_at_once(farm: Farm, tmp_path: Path) -> None:
    text = """
class Asks(Net):
    def on_train_epoch_end(self):
        if self.trainer.is_global_zero:
            print(self.net[0].weight.norm().item())
        self.trainer.strategy.barrier()
L.Trainer(max_epochs=1).fit(Asks(), data)
"""
    errors = [one["error"] for one in run(farm, tmp_path, text)]
    words = r"script\.py:\d+: on_train_epoch_end needs numbers of rank 1.*is_global_zero"
    assert any(re.search(words, error) for error in errors), errors


def test_an_error_of_a_further_fit_before_its_optimizers_is_the_users(farm: Farm, tmp_path: Path) -> None:
    text = """
class Tuned(Net):
    rate = 0.1
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1 * self.rate)
model, trainer = Tuned(), L.Trainer(max_epochs=1)
trainer.fit(model, data)
model.rate = None
trainer.fit(model, data)
"""
    for found in run(farm, tmp_path, text):
        assert found["error"].startswith("TypeError: unsupported operand"), found["error"]


def test_a_module_that_a_data_set_calls_is_refused_in_words(farm: Farm, tmp_path: Path) -> None:
    text = """
class Calls(Net):
    def train_dataloader(self):
        class Played(torch.utils.data.Dataset):
            def __len__(other): return 8
            def __getitem__(other, index):
                if self.trainer.training:
                    self.net(torch.zeros(1, 4)).sum().item()
                return torch.zeros(4), 0
        return DataLoader(Played(), batch_size=4)
L.Trainer(max_epochs=1).fit(Calls())
"""
    errors = [one["error"] for one in run(farm, tmp_path, text)]
    assert any("is called outside of the steps and hooks" in error for error in errors), errors


def test_loaders_read_together_are_validated_without_a_fit(farm: Farm, tmp_path: Path) -> None:
    text = """
from lightning.pytorch.utilities import CombinedLoader
class Pairs(Net):
    def validation_step(self, batch, batch_idx):
        (x, y), (other, _) = batch["left"], batch["right"]
        self.log("loss", F.cross_entropy(self.net(x) - self.net(other), y))
trainer = L.Trainer(logger=False)
result = trainer.validate(Pairs(), CombinedLoader({"left": data, "right": data}, "min_size"))
"""
    found = run(farm, tmp_path, text)
    (alone,) = run(farm, tmp_path, text, strategy="plain", ranks=1)
    assert not list(differences(found[0]["results"], alone["results"])), found[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trainer.fit(Net(), 5)", r"invalid dataloader was passed to `Trainer\.fit\(train_dataloaders"),
        ("trainer.validate(Net(), 5)", r"invalid dataloader was passed to `Trainer\.validate\(dataloaders"),
        (
            "Net.validation_step = lambda self, dataloader_iter: None; trainer.validate(Net(), data)",
            r"ConfigError: Net\.validation_step takes .* so take \(batch, batch_idx\)",
        ),
    ],
)
def test_data_that_are_none_are_told_before_planning(farm: Farm, tmp_path: Path, text: str, words: str) -> None:
    given = "Net.validation_step = Net.training_step; trainer = L.Trainer(max_epochs=1, logger=False)\n"
    errors = [one["error"] for one in run(farm, tmp_path, given + text)]
    assert all(re.search(words, error) for error in errors), errors


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_a_decoder_as_it_comes_trains_by_the_default_plan(farm: Farm) -> None:
    for strategy in ("default", "pipedream"):
        job = farm.start(Order("ordinary.runner.run", ranks=2, script="llama_as_it_comes", strategy=strategy))
        first, second = (one["weights"] for one in job.outcome)
        assert all(torch.equal(first[name], second[name]) and first[name].isfinite().all() for name in first)


class Twice(nn.Module):
    """Uses its first layer again, after it has looked at a number."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.middle, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.head(self.middle(self.stem(x))).mean()
        if loss.item() < 1e9:
            loss = loss + self.stem(x).mean()
        return loss


def test_a_read_that_prevents_the_division_is_named(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.WARNING):
        options: dict[str, Any] = {"devices": 2, "plan": "straight", "device": torch.device("cpu")}
        choose_plan(Twice(), torch.ones(2, 4), cache_folder=tmp_path, **options)
    assert re.search(r"test_ways\.py:\d+ reads a value, and stem is used again after it", caplog.text)
    plan = choose_plan(Twice(), torch.ones(2, 4), cache_folder=tmp_path, reads_bind=False, **options)
    assert len(plan.stages) == 2


class Steps(BoringModel):
    """Losses that are, or are not, what those of a batch's parts add up to."""

    state: Tensor | None = None

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.training_step = getattr(self, kind)

    def ignoring(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.layer(batch[0]), batch[1])

    def masked_by_hand(self, batch: Any, batch_idx: int) -> Tensor:
        mask = (batch[1] >= 0).float()
        return (self.layer(batch[0]).pow(2).mean(1) * mask).sum() / mask.sum()

    def recurrent(self, batch: Any, batch_idx: int) -> Tensor:
        found = self.layer(batch[0]) + (0.0 if self.state is None else self.state)
        self.state = found.detach()
        return found.pow(2).mean()

    def drawing(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.layer(batch[0]) * torch.rand(len(batch[0]), 1)).pow(2).mean()


@pytest.mark.parametrize(
    ("kind", "is_other"), [("ignoring", False), ("masked_by_hand", True), ("recurrent", True), ("drawing", False)]
)
def test_a_loss_that_is_no_mean_over_samples_is_weighed_or_warned_of(
    caplog: pytest.LogCaptureFixture, kind: str, is_other: bool
) -> None:
    batch = torch.randn(8, 32), torch.tensor([0, 1, -100, -100, -100, 1, 0, 1])
    with caplog.at_level(logging.WARNING):
        options: dict[str, Any] = {"device": torch.device("cpu"), "context": torch.enable_grad}
        warn_of_other_loss(Steps(kind), batch, split(batch, 2), **options)
    assert ("no mean over samples" in caplog.text) == is_other


def test_more_devices_than_layers_are_refused_in_lockstep(farm: Farm, tmp_path: Path) -> None:
    text = """
class Manual(Net):
    def __init__(self):
        super().__init__()
        self.net, self.automatic_optimization = nn.Sequential(nn.Linear(4, 3), nn.Identity()), False
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if loss.item() > 0:
            self.manual_backward(loss)
            self.optimizers().step()
L.Trainer(max_epochs=1).fit(Manual(), data)
"""
    errors = [one.get("error", "") for one in run(farm, tmp_path, text, ranks=3)]
    assert all(re.search(r"PlanError: Manual sets automatic_optimization=False.*set devices=\d", e) for e in errors), (
        errors
    )


OVER_SOME = "a loss over some of its targets"


@pytest.mark.parametrize(
    ("target", "more", "words"),
    [
        ("scores.argmax(1).masked_fill(y == 0, -100)", "", OVER_SOME),
        ("y.masked_fill(torch.rand(len(y)) < 0.5, -100)", "", OVER_SOME),
        ("y.masked_fill(y == 0, -100)", "self.log('ppl', loss.exp())", "exp of a loss that is weighed"),
    ],
    ids=["by the model", "by chance", "not linear"],
)
def test_what_cannot_be_weighed_by_targets_is_warned_of(
    farm: Farm, tmp_path: Path, target: str, more: str, words: str
) -> None:
    text = f"""
class Labels(Net):
    def training_step(self, batch, batch_idx):
        (x, y), scores = batch, self.net(batch[0])
        loss = F.cross_entropy(scores, {target})
        {more}
        return loss
L.Trainer(max_epochs=1).fit(Labels(), data)
"""
    assert all("error" not in found for found in run(farm, tmp_path, text))
    job = farm.start(Order("ordinary.runner.run", ranks=2, script=str(tmp_path / "script.py"), strategy="1f1b"))
    assert re.search(rf"script\.py:\d+: {words}", (job.folder / "rank0.log").read_text())


def test_trainers_of_one_script_have_one_number_of_devices(farm: Farm, tmp_path: Path) -> None:
    text = """
from pl_pipe.strategies import PipeDreamStrategy
model = Net()
L.Trainer(max_epochs=1).fit(model, data)
L.Trainer(max_epochs=1, devices=3, strategy=PipeDreamStrategy()).fit(model, data)
"""
    errors = [one["error"] for one in run(farm, tmp_path, text)]
    assert all("started by a trainer with devices=2, and this one has devices=3" in error for error in errors), errors


def test_code_of_no_file_is_refused(tmp_path: Path) -> None:
    script = (
        "import lightning as L, pl_pipe; from lightning.pytorch.demos.boring_classes import BoringModel; "
        "L.Trainer(strategy='pipedream', devices=2, accelerator='cpu', logger=False).fit(BoringModel())"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert "this code is in no file; save it as one and run that, or set devices=1" in done.stderr
