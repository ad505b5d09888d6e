"""`wire_dtype`: activations and gradients are rounded on their way, and nothing else is."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ghost_cases import CASES, WIDTH, Net, owners, trial
from ghost_models import MODELS, Outcome, Trial, assert_equal, piped_run, planned, single_run, train_stage
from pipedream_farm import Farm, Order
from pipedream_models import OPTIMIZERS, make
from pipedream_tasks import SPLITS
from test_ghosts_transport import TIMEOUT_S, over_processes
from torch import Tensor
from torch.nn import functional as F

from pl_pipe.comm import DistributedTransport, LocalNetwork, LocalTransport, Message
from pl_pipe.stages import Ownership, Pipe

pytest_plugins = "pipedream_plugin"


class Cut(torch.autograd.Function):
    """Where a stage ends: what the wire does to a value and to its gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return value.to(dtype).to(value.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].to(ctx.dtype).to(gradients[0].dtype), None


def cut(value: Tensor, dtype: torch.dtype) -> Tensor:
    result: Tensor = Cut.apply(value, dtype)  # type: ignore[no-untyped-call]
    return result


def with_case(case: Any, *, double: bool = False) -> Trial:
    batches = trial("straight").batches
    if double:
        return Trial(lambda: Net(case, {}).double(), lambda net, b: net(*(part.double() for part in b)), batches)
    return Trial(lambda: Net(case, {}), lambda net, b: net(*b), batches)


class Spy(LocalNetwork):
    """Counts what is sent by dtype."""

    def __init__(self) -> None:
        super().__init__(timeout_s=10)
        self.dtypes: Counter[tuple[str, torch.dtype]] = Counter()

    def transport(self) -> LocalTransport:
        network = self

        class Spying(LocalTransport):
            def send(self, message: Message, tensor: Tensor) -> None:
                network.dtypes[message.direction.value, tensor.dtype] += 1
                super().send(message, tensor)

        return Spying(self)


@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_equal_to_one_process_that_rounds_at_the_cuts(dtype: torch.dtype, double: bool) -> None:
    plain = piped_run(with_case(CASES["skip"], double=double), owners("skip", 3))

    def rounded(s: Any, x: Tensor, y: Tensor) -> Tensor:
        h = cut(s.a(x), dtype)
        return s.c(cut(s.b(h) + h, dtype))

    piped = piped_run(with_case(CASES["skip"], double=double), owners("skip", 3), wire_dtype=dtype)
    assert_equal(piped, single_run(with_case(rounded, double=double)))
    assert piped.losses != plain.losses, "the case must feel it"
    assert piped.transfers == plain.transfers
    assert piped.bytes_sent * (4 if double else 2) == plain.bytes_sent


def test_what_is_narrow_or_no_float_travels_as_it_is() -> None:
    def case(s: Any, x: Tensor, y: Tensor) -> Tensor:
        h = s.a(x)
        order = h.detach().argsort(1)  # int64, of the first stage
        half = h.to(torch.bfloat16)
        return s.c(s.b(h).gather(1, order) + half)

    network = Spy()
    piped_run(with_case(case), owners("straight", 2) | {"b": 1, "c": 1}, wire_dtype=torch.float16, network=network)
    assert set(network.dtypes) == {
        ("forward", torch.int64),
        ("forward", torch.bfloat16),
        ("forward", torch.float16),
        ("backward", torch.bfloat16),
        ("backward", torch.float16),
    }


def test_weights_travel_exactly() -> None:
    """A layer that another stage uses: neither its weights nor their gradients are rounded."""
    network = Spy()
    piped_run(trial("tied_functionally"), owners("tied_functionally", 3), wire_dtype=torch.bfloat16, network=network)
    assert network.dtypes["forward", torch.float32] > 0
    assert network.dtypes["backward", torch.float32] > 0
    assert network.dtypes["forward", torch.bfloat16] > 0


def test_numbers_that_python_reads_are_the_same_on_all_stages() -> None:
    """Even where a rounded copy was there already, on which a later stage had computed."""
    read: list[float] = []

    def case(s: Any, x: Tensor, y: Tensor) -> Tensor:
        h = s.a(x)
        size = h.norm()
        g = s.b(h) * size
        read.append(size.item())
        return s.c(g * (1.0 if size > read[0] - 1 else 0.5))

    piped_run(with_case(case), owners("straight", 3), wire_dtype=torch.bfloat16)
    assert len(read) == 3 * 4
    assert max(Counter(read).values()) == min(Counter(read).values()) == 3, "one number a batch, on three stages"
    assert all(torch.tensor(number).bfloat16().item() != number for number in read), "they would be seen rounded"


def test_a_shape_that_follows_from_values_is_one_shape() -> None:
    """Later stages compute it too; numbers that are alike when rounded must not be one number there."""
    sizes: list[int] = []

    def case(s: Any, x: Tensor, y: Tensor) -> Tensor:
        h = s.a(x)
        sizes.append(torch.unique(1 + 1e-4 * h.detach()).numel())
        return s.c(s.b(h))

    piped_run(with_case(case), owners("straight", 3), wire_dtype=torch.bfloat16)
    assert sorted(sizes) == sorted(3 * [len(batch[0]) * WIDTH for batch in with_case(case).batches])


def test_what_is_shown_to_people_is_exact() -> None:
    network = LocalNetwork(timeout_s=1)
    shown = []
    for stage in range(2):
        torch.manual_seed(0)
        net = Net(CASES["straight"], {})
        pipe = Pipe(
            net,
            Ownership.from_mapping(net, owners("straight", 2)),
            stage=stage,
            transport=network.transport(),
            wire_dtype=torch.bfloat16,
        )
        with pipe.step(0) as step:
            h = net.b(net.a(torch.ones(2, WIDTH)))
            net.c(h)  # a rounded copy is on the last stage now
            shown.append(step.bring(h))
    assert torch.equal(shown[0], shown[1])
    assert not torch.equal(shown[1].bfloat16().float(), shown[1])


def _train(rank: int, wire_dtype: torch.dtype | None) -> tuple[list[float], int]:
    sent = 0
    plain = dist.isend

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += tensor.numel() * tensor.element_size() if tensor.is_floating_point() else 0
        return plain(tensor, *args, **kwargs)

    dist.isend = counted
    torch.manual_seed(0)
    outcome, name = Outcome(), "seq2seq"
    try:
        transport = DistributedTransport(timeout_s=TIMEOUT_S)
        model = MODELS[name].build()
        options = {"wire_dtype": wire_dtype}
        train_stage(MODELS[name], model, planned(MODELS[name], 2), rank, transport, outcome, **options)
        transport.flush()
    finally:
        dist.isend = plain
    return outcome.losses, sent


def _both(rank: int) -> list[tuple[list[float], int]]:
    return [_train(rank, None), _train(rank, torch.bfloat16)]


@pytest.mark.slow
def test_over_processes() -> None:
    """Half of the bytes, and the same numbers as over threads."""
    found = over_processes(2, _both)
    for plain, rounded in found:
        assert 0 < rounded[1] == plain[1] / 2
    threads = piped_run(MODELS["seq2seq"], planned(MODELS["seq2seq"], 2), wire_dtype=torch.bfloat16)
    assert found[1][1][0] == threads.losses
    assert found[1][0][0] != threads.losses


LIGHTNING = Order(
    ranks=3,
    validation=False,
    split=True,
    strategy={"schedule": "1f1b", "num_microbatches": 1, "wire_dtype": "bf16"},
    trainer={"max_epochs": 1},
)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("pipeline", [LIGHTNING])
def test_inside_lightning(farm: Farm, pipeline: Order) -> None:
    found = farm.start(pipeline).outcome[0]
    model = make("Mlp")
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    ends = {int(name.split(".")[1]) for name in SPLITS[3]}
    losses = []
    for x, y in found["batches"]:
        h = x
        for index, layer in enumerate(model.layers):  # type: ignore[arg-type]
            h = layer(h)
            h = cut(h, torch.bfloat16) if index in ends else h
        loss = F.cross_entropy(h, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert found["losses"] == pytest.approx(losses, abs=1e-7)
    plain = farm.start(pipeline.over(3, strategy={"schedule": "1f1b", "num_microbatches": 1})).outcome[0]
    assert found["losses"][2:] != pytest.approx(plain["losses"][2:], abs=1e-5)
