"""What the ranks of the tests of sums and adaptive training do."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.request import urlopen

import lightning as L
import pipedream_tasks
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from pipedream_tasks import TIMEOUT_S, Rank
from torch.utils.data import DataLoader, TensorDataset

from pl_pipe.adapt import monitors
from pl_pipe.adapt.estimates import NoiseScale
from pl_pipe.adapt.policies import InterferencePolicy, NoiseBatchPolicy, Policy, SwitchTopology
from pl_pipe.comm import DistributedSumming
from pl_pipe.comm.consensus import ConsensusError, consensus, require_consensus
from pl_pipe.comm.topology import NAMES, AdaptableSums, DistributedMailbox, SumGroups, TopologySumming, topology_of
from pl_pipe.strategies import AdaptiveCommStrategy


@contextmanager
def met(rank: Rank, backend: str = "gloo") -> Iterator[Any]:
    """A process group of all ranks."""
    dist.init_process_group(backend, rank=rank.rank, world_size=rank.ranks)
    try:
        yield dist.new_group(backend="gloo")
    finally:
        dist.destroy_process_group()


def sums(rank: Rank, names: Sequence[str]) -> dict[str, Any]:
    """Tensors of many sizes and types over each topology."""
    ranks = list(range(rank.ranks))
    hosts = [f"host{one // 2}" for one in ranks]
    found: dict[str, Any] = {"sums": {}, "expected": {}}
    latencies_s = [[abs(one - other) + 0.1 for other in ranks] for one in ranks]
    with met(rank) as group:
        mailbox = DistributedMailbox(group, ranks, timeout_s=TIMEOUT_S)
        native = DistributedSumming(dist.group.WORLD, ranks, timeout_s=TIMEOUT_S)
        summing = TopologySumming(topology_of(names[0], hosts), mailbox, native=native, piece_bytes=1 << 16)
        for name in names:
            summing.switch(topology_of(name, hosts, latencies_s=latencies_s))
            for size in (0, 1, 999, 100_001):
                for dtype in (torch.float32, torch.bfloat16, torch.int64):
                    draws = torch.Generator().manual_seed(size)
                    all_ranks = [torch.randint(-10, 11, (size,), generator=draws).to(dtype) for _ in ranks]
                    key = f"{name} {size} {str(dtype).removeprefix('torch.')}"
                    summing.start(all_ranks[rank.rank]).wait()
                    found["sums"][key] = all_ranks[rank.rank]
                    draws = torch.Generator().manual_seed(size)
                    again = [torch.randint(-10, 11, (size,), generator=draws) for _ in ranks]
                    found["expected"][key] = torch.stack(again).sum(0).to(dtype)
        summing.close()
    return found


def watched(rank: Rank) -> dict[str, Any]:
    """Sums beside a default group for tensors on a GPU alone, as NCCL's is."""
    with met(rank, "cuda:gloo") as group:
        made = AdaptableSums(
            "star",
            "host",
            native=group,
            groups=SumGroups.of(range(rank.ranks), timeout_s=TIMEOUT_S),
            timeout_s=TIMEOUT_S,
            gradient_bytes=1 << 12,
        )
        made.watch_traffic()
        made.summing.start(torch.ones(10_000)).wait()
        assert made.summing.watch is not None
        made.summing.watch.settle()
        found = {"links": made.links().wait(), "trials": made.trial([made.topology, topology_of("native", made.hosts)])}
        made.close(together=True)
        return found


def agree(rank: Rank, values: Sequence[Any]) -> dict[str, Any]:
    """Each rank has the value of its place."""
    with met(rank):
        require_consensus(values[rank.rank], what="the topology", remedy="give all ranks the same")
        return {"agreed": consensus(values[rank.rank]).agreed}


class AdaptiveRank(Rank):
    """Whose strategy is ours where settings are given, and Lightning's where there is a name."""

    switches: int | None = None
    """The seed of random switches, one after each step."""
    disagrees = False

    def strategy(self, settings: Mapping[str, Any] | str | None) -> Any:
        if settings is None or isinstance(settings, str):
            return settings or "auto"
        made: Any = Switching if self.switches is not None or self.disagrees else AdaptiveCommStrategy
        strategy = made(**{"timeout_s": TIMEOUT_S, "piece_mb": 0.0001, "adapt": False, **settings})
        strategy.draws, strategy.disagrees = random.Random(self.switches or 0), self.disagrees
        strategy.notes = self.notes
        return strategy


class Switching(AdaptiveCommStrategy):
    """Switches after each step to a topology that chance chooses."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        answer = super().optimizer_step(*args, **kwargs)
        names = [name for name in NAMES if name != "auto"]
        wanted = names[self.global_rank] if self.disagrees else self.draws.choice([*names, [1, 1, 0], "star@2"])
        try:
            self.switch_topology(wanted)
        except ConsensusError as error:
            self.notes["disagreed"], self.notes["kept"] = str(error), self.topology.name
            self.disagrees = False
        self.notes.setdefault("over", []).append(self.topology.name)
        own = {name: value.detach() for name, value in self.lightning_module.named_parameters()}
        self.notes.setdefault("equal", []).append(consensus(own, group=self.sums.control).agreed)
        return answer


def fit(rank: Rank, switches: int | None = None, disagrees: bool = False, **options: Any) -> dict[str, Any]:
    """`pipedream_tasks.fit` with our strategy."""
    me = AdaptiveRank(rank.rank, rank.ranks, rank.folder)
    me.notes, me.switches, me.disagrees = rank.notes, switches, disagrees
    return pipedream_tasks.fit(me, **options)


class MeanOf(L.LightningModule):
    """Its gradient is w - mean(x): a true gradient of w, and the variance of x for noise. Nothing is learned."""

    def __init__(self, size: int = 20) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((size,), 0.5))
        self.local: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (x,) = batch
        self.local.append(self.w.detach() - x.mean(0))
        return 0.5 * (self.w - x).square().sum(1).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def samples(size: int = 20, number: int = 4096, seed: int = 0) -> DataLoader[Any]:
    x = 2.0 * torch.randn(number, size, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x), batch_size=8, shuffle=True)


def monitored(
    rank: Rank,
    strategy: Any = "ddp",
    steps: int = 60,
    kinds: Sequence[str] = (),
    every: int | None = None,
    **trainer: Any,
) -> Any:
    """A run in which nothing is learned, and what the monitors made of it, step by step."""
    made = [getattr(monitors, kind)(**({} if every is None else {"interval": every})) for kind in kinds]
    notes = rank.notes
    notes["values"] = []

    class Note(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            notes["values"].append({name: value for one in made for name, value in one.values.items()})

    class Read(L.Callback):
        def on_train_end(self, *_: Any) -> None:
            if rank.rank == 0 and endpoint:
                with urlopen(f"http://127.0.0.1:{endpoint[0].port}/metrics", timeout=5) as answer:
                    notes["scraped"] = answer.read().decode()

    endpoint = [monitors.PrometheusEndpoint(port=0)] if "StepTime" in kinds else []
    L.seed_everything(1)
    module = MeanOf()
    logger = CSVLogger(rank.folder, name="", version="")
    run = L.Trainer(
        accelerator="cpu", devices=rank.ranks, max_steps=steps, callbacks=[*made, Note(), *endpoint, Read()],
        strategy=AdaptiveCommStrategy(timeout_s=TIMEOUT_S, adapt=False, **strategy) if isinstance(strategy, dict)
        else strategy,
        logger=logger, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **trainer,
    )  # fmt: skip
    run.fit(module, samples())
    notes.update(local=module.local, links=[one.links for one in made if hasattr(one, "links")])
    hooks = module.w._post_accumulate_grad_hooks
    notes["hooks_left"] = 0 if hooks is None else len(hooks)
    return notes


class Numbered(MeanOf):
    """Notes which samples it sees: each is its own number."""

    def __init__(self) -> None:
        super().__init__(1)
        self.seen: list[list[list[int]]] = []
        self.validated = 0

    def on_train_epoch_start(self) -> None:
        self.seen.append([])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen[-1].append([int(value) for value in batch[0].flatten()])
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += batch_idx == 0

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Large(NoiseScale):
    value = 1e6


class Small(NoiseScale):
    value = 1.0


class Known(NoiseBatchPolicy):
    """The noise scale is what the test says."""

    def __init__(self, known: NoiseScale | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._known = known or Large()

    def decide(self, trainer: Any) -> Any:
        self._monitor.estimate = self._known
        return super().decide(trainer)


def batches(rank: Rank, every_steps: int | None = None) -> dict[str, Any]:
    """Batches that grow from epoch to epoch; then a run that goes on from the checkpoint."""
    data = TensorDataset(torch.arange(60.0).view(-1, 1))
    rates: list[float] = []

    class Rates(L.Callback):
        def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def run(policy: Any, module: Any, epochs: int, path: Any = None) -> L.Trainer:
        trainer = L.Trainer(
            accelerator="cpu", devices=rank.ranks, max_epochs=epochs, callbacks=[policy, Rates()], logger=False,
            strategy="ddp" if rank.ranks > 1 else "auto", enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, num_sanity_val_steps=0,
        )  # fmt: skip
        loader = DataLoader(data, batch_size=4 // rank.ranks, shuffle=True)
        trainer.fit(module, loader, DataLoader(data, batch_size=30), ckpt_path=path)
        return trainer

    module, policy = Numbered(), Known(most=16, rate="linear", every_steps=every_steps)
    trainer = run(policy, module, 4 if every_steps is None else 2)
    trainer.save_checkpoint(rank.folder / "kept.ckpt")
    notes = {"sizes": policy.sizes, "seen": module.seen, "rates": rates[:], "validated": module.validated}
    again = Known(most=16)
    run(again, Numbered(), trainer.current_epoch + 1, rank.folder / "kept.ckpt")
    return {**notes, "resumed": again.sizes}


class Half:
    """A change that rank 1 cannot make."""

    def __repr__(self) -> str:
        return "Half()"

    def apply(self, trainer: Any) -> None:
        if trainer.global_rank == 1:
            raise OSError("no space")


def policy(rank: Rank, what: str, on_error: str, probed: bool = False) -> dict[str, Any]:
    """A policy of one's own, in ten lines; where it is `probed`, beside one that always finds the first one quick."""

    class Mine(Policy):
        def decide(self, trainer: Any) -> Any:
            if trainer.global_step != (trainer.max_steps if what == "last" else 3):
                return None
            if what in ("alone", "last"):
                return SwitchTopology("ring") if trainer.global_rank == 1 else None
            if what == "raise" and trainer.global_rank == 1:
                raise ValueError("no such day")
            if what == "wrong":
                return SwitchTopology("rign")
            if what == "half":
                return Half()
            if what == "differ" and trainer.global_rank == 1:
                return SwitchTopology("clique")
            return SwitchTopology("ring")

    mine, module = Mine(on_error=on_error), MeanOf()
    found: dict[str, Any] = {}

    class Look(L.Callback):
        def on_train_end(self, trainer: Any, *_: Any) -> None:
            found["topology"] = trainer.strategy.topology.name

    returning = [InterferencePolicy(probe_every=1, threshold=1e-9, recovered=1e-8)] if probed else []
    trainer = L.Trainer(
        accelerator="cpu", devices=rank.ranks, max_steps=12 if probed else 6, callbacks=[mine, *returning, Look()],
        strategy=AdaptiveCommStrategy("star", adapt=probed, timeout_s=TIMEOUT_S), enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, logger=False,
    )  # fmt: skip
    trainer.fit(module, samples())
    return {**found, "steps": trainer.global_step, "failed": mine.failed, "weights": module.state_dict()}
