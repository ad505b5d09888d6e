"""`recompute`: a step runs again for its backward, to the bit as at first; meanwhile its activations are gone."""

import gc
from typing import Any

import pytest
import torch
from ghost_cases import CASES, REFUSED, ROUNDED, owners, trial
from ghost_models import MODELS, Outcome, assert_close, assert_equal, piped_run, planned, single_run
from pipedream_farm import Farm, Order
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from pl_pipe.comm import LocalNetwork, Message
from pl_pipe.comm.local import LocalTransport
from pl_pipe.errors import StageError
from pl_pipe.stages import Ownership, Pipe
from pl_pipe.tensors.ghosts import TensorSpec

pytest_plugins = "pipedream_plugin"

# ---- one step after the other, over threads


@pytest.mark.parametrize("name", [name for name in CASES if name not in REFUSED])
def test_an_awkward_step_is_the_same_again(name: str) -> None:
    piped = piped_run(trial(name), owners(name, 3), recompute=True)
    single = single_run(trial(name))
    assert_close(piped, single) if name in ROUNDED else assert_equal(piped, single)
    assert piped.forgotten == 8, "four steps on the first two of three stages"


@pytest.mark.parametrize("name", ["resnet18", "seq2seq"])
def test_a_model_is_the_same_again(name: str) -> None:
    """Batch norm, skip connections cut through, recurrent layers with lengths that vary."""
    piped = piped_run(MODELS[name], planned(MODELS[name], 3), recompute=True)
    assert_equal(piped, single_run(MODELS[name]))
    assert piped.forgotten == 2 * len(MODELS[name].batches)


def test_with_values_that_were_rounded_on_their_way() -> None:
    plain = piped_run(MODELS["seq2seq"], planned(MODELS["seq2seq"], 3), wire_dtype=torch.bfloat16)
    again = piped_run(MODELS["seq2seq"], planned(MODELS["seq2seq"], 3), wire_dtype=torch.bfloat16, recompute=True)
    assert_equal(again, plain)


# ---- what is kept

BATCH_BYTES = 4 * 16 * 4


class Deep(nn.Module):
    """Layers whose outputs can be watched."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)))
        self.in_place = in_place
        self.outputs: list[tuple[StorageWeakRef, int]] = []
        for module in self.layers.modules():
            if not isinstance(module, nn.Sequential):
                module.register_forward_hook(lambda *given: self.watch(given[2]))

    def watch(self, output: Tensor) -> None:
        if not output.is_meta:
            storage = output.untyped_storage()
            self.outputs.append((StorageWeakRef(storage), storage.nbytes()))

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            x.add_(1)
        return self.layers(x).pow(2).mean()


class Viewed(nn.Module):
    """Values that share memory know each other: they are in a circle."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).view(x.shape).tanh()
            x = x.view(x.shape)
        return x.pow(2).mean()


class Remembering(LocalTransport):
    """Knows what it has received, and does not keep it."""

    def __init__(self, network: LocalNetwork) -> None:
        super().__init__(network)
        self.received: list[StorageWeakRef] = []

    def receive(self, message: Message, spec: TensorSpec) -> Tensor:
        tensor = super().receive(message, spec)
        self.received.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor


class Ranks:
    """Stages in one thread, one after the other; sends never wait."""

    def __init__(self, *, recompute: bool, in_place: bool = False, stages: int = 2) -> None:
        self.network = LocalNetwork(timeout_s=1)
        owned = {f"layers.{index}.{part}": index * stages // 8 for index in range(8) for part in (0, 1)}
        self.pipes = []
        for stage in range(stages):
            torch.manual_seed(0)
            model = Deep(in_place)
            ownership = Ownership.from_mapping(model, owned)
            self.pipes.append(
                Pipe(model, ownership, stage=stage, transport=self.network.transport(), recompute=recompute)
            )
        self.number = 0

    def forward(self, stage: int, number: int, x: Tensor) -> Any:
        pipe = self.pipes[stage]
        loss = None
        with pipe.step(number, x) as step:
            loss = pipe.model(x)
        return step, loss, step.forget(lambda _: pipe.model(x))

    def kept_bytes(self, stage: int) -> int:
        """Of the outputs of own layers."""
        outputs: Any = self.pipes[stage].model.outputs
        return sum(size for storage, size in outputs if not storage.expired())


def kept_between(*, recompute: bool, batches: int = 3) -> tuple[int, int, Any]:
    """Bytes of the first stage's activations while batches wait for backward, and afterwards; gradients."""
    ranks = Ranks(recompute=recompute)
    waiting = [ranks.forward(0, number, torch.ones(4, 16) + number) for number in range(batches)]
    kept = ranks.kept_bytes(0)
    gradients = []
    for number, (step, loss, forgotten) in enumerate(waiting):
        assert forgotten is recompute
        last, last_loss, last_forgotten = ranks.forward(1, number, torch.ones(4, 16) + number)
        assert not last_forgotten, "the last stage's backward follows at once"
        last.backward(last_loss)
        step.backward(loss)
        gradients.append([p.grad.clone() for _, p in ranks.pipes[0].own_named_parameters() if p.grad is not None])
    del waiting, step, loss
    assert not ranks.network.unread()
    return kept, ranks.kept_bytes(0), gradients


def test_activations_do_not_wait_for_backward() -> None:
    """Of a linear layer and its tanh the latter's output is kept: its backward needs it, and so does the next layer."""
    kept, after, expected = kept_between(recompute=False)
    assert kept == 3 * 4 * BATCH_BYTES
    assert after == 0
    kept, after, gradients = kept_between(recompute=True)
    assert kept == 0
    assert after == 0
    for got, want in zip(gradients, expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
        assert want


@pytest.mark.parametrize(("recompute", "kept"), [(False, 3 * 2 * BATCH_BYTES), (True, 0)])
def test_activations_of_a_middle_stage_do_not_wait_either(recompute: bool, kept: int) -> None:
    ranks = Ranks(recompute=recompute, stages=4)
    batches = [torch.ones(4, 16) + number for number in range(3)]
    waiting = [[ranks.forward(stage, number, x) for stage in (0, 1)] for number, x in enumerate(batches)]
    assert ranks.kept_bytes(1) == kept
    for number, x in enumerate(batches):
        steps = [*waiting[number], *(ranks.forward(stage, number, x) for stage in (2, 3))]
        waiting[number] = []
        while steps:
            step, loss, _ = steps.pop()
            step.backward(loss)
    del step, loss
    assert ranks.kept_bytes(1) == 0


@pytest.mark.parametrize("recompute", [False, True])
def test_what_came_does_not_wait_for_a_sweep(recompute: bool) -> None:
    """A step that is over may be in a circle with its values, which Python finds much later."""
    network = LocalNetwork(timeout_s=1)
    transports = [Remembering(network) for _ in range(3)]
    pipes = []
    for stage, transport in enumerate(transports):
        model = Viewed()
        ownership = Ownership.from_mapping(model, {f"layers.{index}": index for index in range(3)})
        pipes.append(Pipe(model, ownership, stage=stage, transport=transport, recompute=recompute))
    gc.collect()
    gc.disable()
    try:
        for number in range(4):
            x, steps = torch.ones(4, 16), []
            for pipe in pipes:
                loss = None
                with pipe.step(number, x) as step:
                    loss = pipe.model(x)
                step.forget(lambda _, pipe=pipe, x=x: pipe.model(x))
                steps.append((step, loss))
            while steps:
                step, loss = steps.pop()
                step.backward(loss)
            del step, loss
        kept = [sum(not storage.expired() for storage in transport.received) for transport in transports]
    finally:
        gc.enable()
    assert [len(transport.received) for transport in transports] == [4, 8, 4], "activations and gradients"
    assert kept == [0, 0, 0]


def test_a_step_that_changes_its_batch_keeps_its_graph() -> None:
    """It could not begin again; so it is no repetition, but right."""
    ranks = Ranks(recompute=True, in_place=True)
    x = torch.ones(4, 16)
    step, loss, forgotten = ranks.forward(0, 0, x.clone())
    assert not forgotten
    last, last_loss, _ = ranks.forward(1, 0, x.clone())
    last.backward(last_loss)
    step.backward(loss)
    assert all(p.grad is not None for _, p in ranks.pipes[0].own_named_parameters())


def test_a_batch_that_is_changed_while_it_waits_is_an_error() -> None:
    ranks = Ranks(recompute=True)
    x = torch.ones(4, 16)
    step, loss, forgotten = ranks.forward(0, 0, x)
    assert forgotten
    x.zero_()
    with pytest.raises(StageError, match=r"changed between its forward and its backward.*recompute=false"):
        step.backward(loss)


def test_flags_that_change_meanwhile_are_an_error() -> None:
    ranks = Ranks(recompute=True)
    step, loss, _ = ranks.forward(0, 0, torch.ones(4, 16))
    ranks.pipes[0].model.eval()
    with pytest.raises(StageError, match=r"training flags or frozen parameters changed.*recompute=false"):
        step.backward(loss)


def test_nothing_is_kept_for_an_evaluation() -> None:
    ranks = Ranks(recompute=True)
    with torch.no_grad():
        _, _, forgotten = ranks.forward(0, 0, torch.ones(4, 16))
    assert not forgotten
    assert ranks.kept_bytes(0) == 0


# ---- inside Lightning

EVENTFUL = {
    "model": "Eventful",
    "validation": False,
    "scheduler": "step",
    "trainer": {"max_epochs": 2},
    "data": {"samples": 40, "batch_size": 8},
}
SPLIT = {2: ["recurrent"], 3: ["drop", "middle"], 4: ["first", "drop", "recurrent"]}


def eventful(ranks: int, schedule: str, *, recompute: bool, **options: Any) -> Order:
    strategy = {"schedule": schedule, "split_points": SPLIT[ranks], "recompute": recompute, **options}
    return Order(ranks=ranks, strategy=strategy, seed=ranks, **EVENTFUL)


PAIRS = [
    pytest.param(*(eventful(ranks, schedule, recompute=flag, **options) for flag in (False, True)), id=name)
    for name, ranks, schedule, options in (
        ("pipedream-2", 2, "pipedream", {}),
        ("pipedream-4", 4, "pipedream", {}),
        ("1f1b-3", 3, "1f1b", {"num_microbatches": 2}),
        ("2bw-3", 3, "pipedream_2bw", {}),
        ("wire-3", 3, "pipedream", {"wire_dtype": "bf16"}),
    )
]


@pytest.mark.parametrize(("plain", "again"), PAIRS)
def test_training_is_the_same_to_the_bit(farm: Farm, plain: Order, again: Order) -> None:
    """Dropout, batch norm, an LSTM, skips, a module called twice, counters, carried state and metrics."""
    expected, found = farm.start(plain).outcome, farm.start(again).outcome
    assert found[0]["losses"] == expected[0]["losses"]
    assert len(set(found[0]["losses"])) > 5
    assert found[0]["metrics"] == expected[0]["metrics"]
    assert "middle" in found[0]["metrics"]
    assert found[0]["summed"] > 0, "rank 0 adds up what the first stage has"
    for one, other in zip(found, expected, strict=True):
        assert one["counted"] == other["counted"]
        assert one["counted"][0] == len(one["counted"][1]) > 0
        assert torch.equal(one["summed"], other["summed"])
        for name, weight in other["weights"].items():
            assert torch.equal(one["weights"][name], weight), name


def test_a_step_that_depends_on_the_time_is_refused(farm: Farm) -> None:
    """By global_step, which has gone on when the step runs again."""
    order = Order(model="Counting", ranks=2, validation=False, split=True, strategy={"recompute": True})
    errors = farm.start(order).errors
    assert any("gave other numbers for transfer 0" in error and "recompute=false" in error for error in errors), errors


def test_one_process_has_nothing_to_recompute(farm: Farm) -> None:
    plain = farm.start(Order(validation=False)).outcome[0]
    assert farm.start(Order(validation=False, strategy={"recompute": True, "schedule": "1f1b"})).outcome[0][
        "losses"
    ] == pytest.approx(plain["losses"])


def test_the_outcome_counts_repetitions() -> None:
    assert Outcome().forgotten == 0
    assert piped_run(trial("straight"), owners("straight", 2)).forgotten == 0
