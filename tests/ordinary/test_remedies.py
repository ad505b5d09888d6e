"""What an error tells the user to do is done, and works. A script with a fault -> its error -> the script mended."""

import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from pipedream_farm import Farm, Order

pytest_plugins = "pipedream_plugin"
pytestmark = pytest.mark.slow

HEAD = """
import lightning as L, torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import *
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler
import pl_pipe
from pl_pipe.strategies import PipeDreamStrategy

L.seed_everything(1)

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        self.build()
    def build(self): pass
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

tensors = TensorDataset(torch.randn(32, 4), torch.randint(0, 3, (32,)))
data = DataLoader(tensors, batch_size=8)

def trainer(devices=2, strategy=None, callbacks=(), **options):
    pipeline = PipeDreamStrategy(timeout_s=30, **{"plan": "straight", "schedule": "1f1b", **(strategy or {})})
    given = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, **options}
    return L.Trainer(devices=devices, accelerator="cpu", strategy=pipeline, callbacks=list(callbacks), **given)
"""
FIT = "trainer(strategy=dict({})).fit(Net(), data)"
CALLBACK = "trainer(callbacks=[{}]).fit(Net(), data)"
OF_TRAINER = "trainer({}).fit(Net(), data)"
STEP = """
class User(Net):
    def training_step(self, batch, batch_idx):
        {}
trainer(strategy=dict(%s)).fit(User(), data)
"""
OPTIMIZERS = """
class User(Net):
    def configure_optimizers(self):
        {}
trainer().fit(User(), data)
"""
LOADER = "trainer(strategy=dict(%s)).fit(Net(), {})"
COUNTS = """
class User(Net):
    seen = 0
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.seen += loss.item() > 0
        return loss
trainer(strategy=dict({})).fit(User(), data)
"""
LATE = "schedule='pipedream'"
PLATEAU = (
    "optimizer = torch.optim.SGD(self.parameters(), lr=0.1); "
    "scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer); "
    "return {'optimizer': optimizer, 'lr_scheduler': {'scheduler': scheduler, 'monitor': 'x', "
)
LOSS = "loss = F.cross_entropy(self.net(batch[0]), batch[1]); "


class Case(NamedTuple):
    name: str
    script: str
    fault: str
    words: str
    """What the error says, as a regular expression."""
    remedy: str
    """In the fault's place."""


CASES = (
    Case("schedule", FIT, "schedule='1f2b'", "schedule=1f2b is unknown; choose one of .*gpipe", "schedule='gpipe'"),
    Case(
        "no-such-option", FIT, "shedule='1f1b'", "shedule=.1f1b. is no option.*; it has .*schedule", "schedule='1f1b'"
    ),
    Case(
        "parts-of-whole-batches",
        FIT,
        LATE + ", num_microbatches=2",
        "leave it out, or set",
        "schedule='1f1b', num_microbatches=2",
    ),
    Case("parts-left-out", FIT, LATE + ", num_microbatches=2", "leave it out, or set", LATE),
    Case("vertical-sync", FIT, "vertical_sync=True", "leave it out", ""),
    Case("update", FIT, "update='minibatch'", "leave it out, or set schedule=pipedream", LATE + ", update='minibatch'"),
    Case(
        "replicas-of-nothing",
        FIT,
        "plan='auto', replicas=[1, 1]",
        r"name 1 module\(s\) with split_points",
        "plan='auto', split_points=['net.2'], replicas=[1, 1]",
    ),
    Case(
        "plan-and-split-points",
        FIT,
        "plan='straight', split_points=['net.2']",
        "leave one of them out",
        "plan='auto', split_points=['net.2']",
    ),
    Case(
        "too-many-replicas",
        FIT,
        "plan='auto', split_points=['net.2'], replicas=[2, 1]",
        "set devices=3, or numbers that add up to 2",
        "plan='auto', split_points=['net.2'], replicas=[1, 1]",
    ),
    Case(
        "split-points-as-text",
        FIT,
        "plan='auto', split_points='net.2'",
        r"give a list of module names, such as \[net.2\]",
        "plan='auto', split_points=['net.2']",
    ),
    Case(
        "split-at-no-layer",
        FIT,
        "plan='auto', split_points=['body.2']",
        "body.2, which is no layer.*name one of.*net.2",
        "plan='auto', split_points=['net.2']",
    ),
    Case(
        "split-after-the-last",
        FIT,
        "plan='auto', split_points=['net.4']",
        "split between two modules.*net.2",
        "plan='auto', split_points=['net.2']",
    ),
    Case(
        "too-many-points",
        FIT,
        "plan='auto', split_points=['net.0', 'net.2']",
        "set .*devices=3|3 (devices|workers|stages)",
        "plan='auto', split_points=['net.2']",
    ),
    Case("no-such-plan", FIT, "plan='strait'", "plan=strait is unknown; choose auto or straight", "plan='straight'"),
    Case("no-plan-file", FIT, "plan='nowhere.json'", "nowhere.json", "plan='straight'"),
    Case(
        "timeout",
        "L.Trainer(devices=2, accelerator='cpu', strategy=PipeDreamStrategy({}), max_epochs=1).fit(Net(), data)",
        "timeout_s=0",
        "timeout_s=0.*give the seconds",
        "timeout_s=20",
    ),
    Case("load-data", FIT, "load_data='some'", "choose one of all, needed", "load_data='needed'"),
    Case("sync-batchnorm", OF_TRAINER, "sync_batchnorm=True", "leave it out", ""),
    Case(
        "interval-as-time",
        OF_TRAINER,
        "val_check_interval='00:00:00:05'",
        "give a number of batches",
        "val_check_interval=2",
    ),
    Case(
        "pruning",
        CALLBACK,
        "ModelPruning('l1_unstructured', amount=0.5)",
        "prune the model before or after training",
        "",
    ),
    Case(
        "spikes",
        CALLBACK,
        "__import__('lightning.pytorch.callbacks', fromlist=['x']).SpikeDetection()",
        "raise in a callback of your own on rank 0",
        "LambdaCallback(on_train_batch_end=lambda t, *_: print(t.is_global_zero))",
    ),
    Case(
        "saving-by-time",
        "trainer(enable_checkpointing=True, callbacks=[{}]).fit(Net(), data)",
        "ModelCheckpoint(train_time_interval=__import__('datetime').timedelta(seconds=1))",
        "set every_n_train_steps",
        "ModelCheckpoint(every_n_train_steps=2)",
    ),
    Case("batch-size-finder", CALLBACK, "BatchSizeFinder()", "on one device only", ""),
    Case(
        "averages-late",
        "trainer(strategy=dict({}), callbacks=[EMAWeightAveraging()]).fit(Net(), data)",
        LATE,
        "set schedule=1f1b",
        "schedule='1f1b'",
    ),
    Case(
        "rate-finder-late",
        """
class User(Net):
    lr = 0.1
trainer(strategy=dict({}), callbacks=[LearningRateFinder(num_training_steps=12)]).fit(User(), data)
""",
        LATE,
        "set schedule=1f1b",
        "schedule='1f1b'",
    ),
    Case(
        "accumulation-late",
        "trainer(strategy=dict({}), callbacks=[GradientAccumulationScheduler({{0: 2}})]).fit(Net(), data)",
        LATE,
        "or schedule=1f1b",
        "schedule='1f1b'",
    ),
    Case(
        "swa-of-batch-norm",
        """
class User(Net):
    def build(self): self.net[1] = nn.BatchNorm1d(8)
trainer(callbacks=[{}]).fit(User(), data)
""",
        "StochasticWeightAveraging(swa_lrs=0.1)",
        r"use WeightAveraging\(use_buffers=True\)",
        "WeightAveraging(use_buffers=True)",
    ),
    Case(
        "synchronized-batch-norm",
        "class User(Net):\n    def build(self): self.net[1] = {}\ntrainer().fit(User(), data)",
        "nn.SyncBatchNorm(8)",
        "use BatchNorm",
        "nn.BatchNorm1d(8)",
    ),
    Case(
        "lbfgs",
        OPTIMIZERS,
        "return torch.optim.LBFGS(self.parameters())",
        "choose another optimizer",
        "return torch.optim.Adam(self.parameters())",
    ),
    Case(
        "plateau-by-step",
        OPTIMIZERS,
        PLATEAU + "'interval': 'step'}}",
        "set interval=epoch",
        PLATEAU + "'interval': 'epoch', 'strict': False}}",
    ),
    Case(
        "foreign-parameter",
        """
class User(Net):
    def build(self): self.scales = {}([nn.Parameter(torch.ones(3))])
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]) * self.scales[0], batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD([*self.net.parameters(), *self.scales], lr=0.1)
trainer().fit(User(), data)
""",
        "list",
        "make it an attribute of a module .nn.ParameterList",
        "nn.ParameterList",
    ),
    Case(
        "no-loss", STEP % "", LOSS + "return None", r"return a loss.* of zero \(loss \* 0\)", LOSS + "return loss * 0"
    ),
    Case(
        "loss-of-a-batch",
        STEP % "",
        "return F.cross_entropy(self.net(batch[0]), batch[1], reduction='none')",
        "the loss of User has shape.*return",
        LOSS + "return loss",
    ),
    Case("detached-loss", STEP % "", LOSS + "return loss.detach()", "remove the detach", LOSS + "return loss"),
    Case(
        "dataloader-iter",
        """
class User(Net):
    def training_step(self, {}):
        return F.cross_entropy(self.net(batch[0]), batch[1])
trainer().fit(User(), data)
""",
        "dataloader_iter",
        r"take \(batch, batch_idx\)",
        "batch, batch_idx",
    ),
    Case(
        "set-after-a-read",
        COUNTS,
        LATE,
        "set it in on_train_batch_end, or set schedule=1f1b, num_microbatches=1",
        "num_microbatches=1",
    ),
    Case(
        "set-after-a-read-in-a-hook",
        """
class User(Net):
    seen = 0
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        {}
        return loss
    def on_train_batch_end(self, *_):
        self.seen += 1
trainer(strategy=dict(schedule='pipedream')).fit(User(), data)
""",
        "self.seen += loss.item() > 0",
        "set it in on_train_batch_end",
        "loss.item()",
    ),
    Case(
        "manual-late",
        """
class User(Net):
    def build(self): self.automatic_optimization = False
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
        optimizer.step()
trainer(strategy=dict({})).fit(User(), data)
""",
        LATE,
        "set schedule=1f1b",
        "schedule='1f1b'",
    ),
    Case(
        "sampler-of-a-part",
        LOADER % "",
        "DataLoader(tensors, batch_size=8, sampler=DistributedSampler(tensors, num_replicas=2, rank=0))",
        "leave it out",
        "data",
    ),
    Case(
        "unordered-workers",
        LOADER % "",
        "DataLoader(tensors, batch_size=8, num_workers=1, in_order=False)",
        "set in_order=True or num_workers=0",
        "DataLoader(tensors, batch_size=8, num_workers=1, in_order=True)",
    ),
    Case("loader-used-up", LOADER % "", "iter([next(iter(data))] * 3)", "such as a DataLoader", "data"),
    Case(
        "no-batches",
        LOADER % "",
        "DataLoader(TensorDataset(torch.zeros(0, 4), torch.zeros(0)), batch_size=8)",
        "",
        "data",
    ),
    Case(
        "unclear-samples",
        """
def collate(rows):
    x, y = (torch.stack(column) for column in zip(*rows))
    return x, y, torch.ones(5)
trainer(strategy=dict({})).fit(Net(), DataLoader(tensors, batch_size=8, collate_fn=collate))
""",
        "num_microbatches=2",
        "or set num_microbatches=1",
        "num_microbatches=1",
    ),
    Case(
        "batch-of-objects",
        """
class Graph:
    def __init__(self, rows): self.x, self.y = (torch.stack(column) for column in zip(*rows))
class User(Net):
    def training_step(self, batch, batch_idx): return F.cross_entropy(self.net(batch.x), batch.y)
trainer(strategy=dict({})).fit(User(), DataLoader(tensors, batch_size=8, collate_fn=Graph))
""",
        "num_microbatches=2",
        "or set num_microbatches=1",
        "num_microbatches=1",
    ),
    Case(
        "lazy-layers",
        "class User(Net):\n    def build(self): self.net[0] = {}\ntrainer().fit(User(), data)",
        "nn.LazyLinear(8)",
        "lazy",
        "nn.Linear(4, 8)",
    ),
    Case(
        "frozen-model",
        """
class User(Net):
    def build(self): self.net.requires_grad_({})
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)
trainer().fit(User(), data)
""",
        "False",
        "requires_grad|no gradient",
        "True",
    ),
)


def run(farm: Farm, tmp_path: Path, text: str) -> list[dict[str, Any]]:
    path = tmp_path / "script.py"
    path.write_text(HEAD + text)
    return farm.start(Order("ordinary.runner.run", ranks=2, script=str(path), strategy="named")).results


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_the_remedy_of_an_error_works(farm: Farm, tmp_path: Path, case: Case) -> None:
    (tmp_path / "fault").mkdir()
    (tmp_path / "mended").mkdir()
    for rank, found in enumerate(run(farm, tmp_path / "fault", case.script.format(case.fault))):
        error = found.get("error", "it was not refused")
        assert re.search(case.words, error), f"rank {rank}: {error}"
        assert re.match(r"\w*(Config|Plan|Data|Stage|Profile|Peer)Error|MisconfigurationException", error), error
    for rank, found in enumerate(run(farm, tmp_path / "mended", case.script.format(case.remedy))):
        assert "error" not in found, f"rank {rank}: {found['traceback']}"
