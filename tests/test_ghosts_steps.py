"""Steps on one rank or few: what a runtime relies on."""

import copy
import gc
import threading
from typing import Any

import ghost_cases
import pytest
import torch
import torch.utils.checkpoint
from ghost_cases import owners, trial
from ghost_models import MODELS, Outcome, assert_equal, piped_run, planned, single_run
from torch import Tensor, nn
from torch.autograd.function import _SingleLevelFunction
from torch.multiprocessing.reductions import StorageWeakRef

from pl_pipe.comm import CommunicationError, LocalNetwork, Message
from pl_pipe.errors import StageError
from pl_pipe.stages import Ownership, Pipe
from pl_pipe.tensors.ghosts import TensorSpec, value_of

LAYERS = 3


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(LAYERS)])


OWNERS = {f"{index}.{part}": index for index in range(LAYERS) for part in range(2)}


class Stub:
    """Receives ones at once, and notes what is asked of it."""

    in_order = False

    def __init__(self) -> None:
        self.log: list[str] = []

    def send(self, message: Message, tensor: Tensor) -> None:
        self.log.append(f"send {message}")

    def expect(self, message: Message, spec: TensorSpec) -> None:
        self.log.append(f"expect {message}")

    def receive(self, message: Message, spec: TensorSpec) -> Tensor:
        self.log.append(f"receive {message}")
        return torch.ones(spec.shape, dtype=spec.dtype)

    def flush(self) -> None: ...


def one_rank(stage: int, **options: Any) -> tuple[nn.Sequential, Pipe, Stub]:
    model, stub = chain(), Stub()
    return model, Pipe(model, Ownership.from_mapping(model, OWNERS), stage=stage, transport=stub, **options), stub


def test_a_rank_sends_receives_and_expects_in_order() -> None:
    model, pipe, stub = one_rank(1)
    x = torch.ones(2, 4)
    with pipe.step(7, x) as step:
        loss = model(x).sum()
    assert stub.log == [
        "receive transfer 0 of batch 7 from stage 0 to stage 1",
        "send transfer 0 of batch 7 from stage 1 to stage 2",
        "expect gradient 0 of batch 7 from stage 2 to stage 1",
    ]
    value = value_of(loss)
    assert loss.is_meta
    assert value is not None
    assert value.home == 2
    stub.log.clear()
    step.backward(loss)
    assert stub.log == [
        "receive gradient 0 of batch 7 from stage 2 to stage 1",
        "send gradient 0 of batch 7 from stage 1 to stage 0",
    ]
    assert model[1][0].weight.grad is not None
    assert model[0][0].weight.grad is None


def test_receives_are_announced_once_batches_repeat_themselves() -> None:
    model, pipe, stub = one_rank(2)
    announced = []
    for number, size in enumerate((2, 2, 2, 3, 2)):
        stub.log.clear()
        x = torch.ones(size, 4)
        with pipe.step(number, x):
            model(x)
        announced.append(stub.log[0].startswith("expect"))
    assert announced == [False, False, True, False, True]


def test_without_gradients_none_is_expected() -> None:
    model, pipe, stub = one_rank(1)
    x = torch.ones(2, 4)
    with torch.no_grad(), pipe.step(0, x) as step:
        loss = model.eval()(x).sum()
    step.backward(loss)
    assert stub.log == [
        "receive transfer 0 of batch 0 from stage 0 to stage 1",
        "send transfer 0 of batch 0 from stage 1 to stage 2",
    ]


def test_a_rank_leaves_when_it_is_done() -> None:
    seen = []
    model, pipe, stub = one_rank(0, leave_early=True)
    x = torch.ones(2, 4)
    for number in range(4):
        with pipe.step(number, x) as step:
            seen.append(0)
            model(x).sum()
            seen[-1] = 1
        assert step.left == (seen[-1] == 0)
    assert seen == [1, 1, 0, 0]
    assert len([entry for entry in stub.log if entry.startswith("send")]) == 4


def test_foreign_layers_run_once_a_signature() -> None:
    model, pipe, _ = one_rank(2)
    calls = []
    plain = nn.Linear.forward

    def counted(self: nn.Linear, x: Tensor) -> Tensor:
        calls.append(self)
        return plain(self, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Linear, "forward", counted)
        pipe.close()
        pipe = Pipe(model, pipe.ownership, stage=2, transport=Stub())
        for number, size in enumerate((2, 2, 5, 2, 5)):
            x = torch.ones(size, 4)
            with pipe.step(number, x):
                model(x)
    assert calls.count(model[0][0]) == 2
    assert calls.count(model[2][0]) == 5


def test_a_change_of_mode_or_frozen_weights_is_learnt_anew() -> None:
    model, pipe, stub = one_rank(2)
    x = torch.ones(2, 4)
    needed = []
    for number, frozen in enumerate((False, False, True, True, False)):
        model[0].requires_grad_(not frozen)
        model[1].requires_grad_(not frozen)
        with pipe.step(number, x) as step:
            loss = model(x).sum()
        stub.log.clear()
        step.backward(loss)
        needed.append(any("send gradient" in entry for entry in stub.log))
    assert needed == [True, True, False, False, True]


def test_several_steps_in_flight_with_older_weights() -> None:
    """Asynchronous 1F1B by hand over two stages: stage 0 runs one batch ahead on the weights it then has."""
    batches = [torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    network = LocalNetwork(timeout_s=5)
    losses: list[float] = []
    errors: list[BaseException] = []

    def rank(stage: int) -> None:
        try:
            mine = copy.deepcopy(model)
            pipe = Pipe(
                mine, Ownership.from_mapping(mine, {"0": 0, "1": 1}), stage=stage, transport=network.transport()
            )
            in_flight: list[Any] = []

            def retire() -> None:
                step, loss, version = in_flight.pop(0)
                step.backward(loss)
                if not loss.is_meta:
                    losses.append(loss.item())
                with torch.no_grad():
                    for name, parameter in pipe.own_named_parameters():
                        parameter -= 0.1 * version[name].grad

            for number, batch in enumerate(batches):
                version = {name: p.detach().clone().requires_grad_() for name, p in pipe.own_named_parameters()}
                with pipe.step(number, batch, parameters=version) as step:
                    loss = mine(batch).tanh().pow(2).mean()
                in_flight.append((step, loss, version))
                if len(in_flight) > 1 - stage:
                    retire()
            while in_flight:
                retire()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(stage,), daemon=True) for stage in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors, errors
    assert not network.unread()
    assert losses == stale_reference(model, batches)


def stale_reference(model: nn.Module, batches: list[Tensor]) -> list[float]:
    """Layer 0 of batch k is one update behind layer 1."""
    history = [{name: p.detach().clone() for name, p in model.named_parameters()}]
    losses = []
    for number, batch in enumerate(batches):
        used = {name: history[max(0, number - (name[0] == "0"))][name].clone().requires_grad_() for name in history[0]}
        loss = torch.func.functional_call(model, used, (batch,)).tanh().pow(2).mean()
        loss.backward()
        losses.append(loss.item())
        history.append({name: history[-1][name] - 0.1 * used[name].grad for name in used})  # type: ignore[operator]
    return losses


def test_versions_of_other_stages_parameters_are_refused() -> None:
    _, pipe, _ = one_rank(1)
    with (
        pytest.raises(StageError, match=r"0\.0\.weight is given to stage 1"),
        pipe.step(0, None, parameters={"0.0.weight": torch.ones(4, 4)}),
    ):
        pass


def test_nothing_of_torch_stays_patched() -> None:
    before = vars(_SingleLevelFunction).get("apply")
    generator = torch.utils.checkpoint._checkpoint_without_reentrant_generator
    model, pipe, _ = one_rank(1)

    def fail() -> None:
        with pipe.step(0, torch.ones(2, 4)):
            assert torch.utils.checkpoint._checkpoint_without_reentrant_generator is not generator
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert vars(_SingleLevelFunction).get("apply") is before
    assert torch.utils.checkpoint._checkpoint_without_reentrant_generator is generator
    assert torch._C._len_torch_function_stack() == 0
    pipe.close()
    assert "forward" not in vars(model[1][0])


def test_a_copy_of_a_piped_model_is_an_ordinary_one() -> None:
    model, pipe, stub = one_rank(0)
    twin = copy.deepcopy(model[0])
    x = torch.ones(2, 4)
    expected = chain()[0](x)
    with pipe.step(0, x):
        assert torch.equal(twin(x), expected)
    assert not stub.log


def test_what_was_received_is_freed_with_its_backward() -> None:
    """Without a sweep of the garbage collector, which comes when it likes."""
    model, pipe, stub = one_rank(1)
    buffers = []
    plain = stub.receive

    def receive(message: Message, spec: TensorSpec) -> Tensor:
        buffer = plain(message, spec)
        buffers.append(StorageWeakRef(buffer.untyped_storage()))
        return buffer

    stub.receive = receive  # type: ignore[method-assign]
    gc.collect()
    gc.disable()
    try:
        for number in range(2):
            x = torch.ones(2, 4)
            with pipe.step(number, x) as step:
                loss = model(x).sum()
            assert not buffers[0].expired()
            step.backward(loss)
            del step, loss
            assert all(buffer.expired() for buffer in buffers)
            buffers.clear()
    finally:
        gc.enable()


def test_ghosts_say_what_they_are() -> None:
    model, pipe, _ = one_rank(0)
    with pipe.step(0, None):
        h = model(torch.ones(2, 4))
        assert repr(h) == "ghost(float32[2, 4], stage=2)"
        assert h.device == torch.device("cpu")


def test_random_numbers_of_no_stage_are_the_same_on_all() -> None:
    """Noise on the input: drawn by every rank, used by the first and the last, after the middle drew for itself."""

    def noisy(s: Any, x: Tensor, y: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        h = s.b(s.a(x + noise))
        return s.c(h) + noise + torch.rand(()) * x.new_ones(())

    ghost_cases.CASES["noisy"] = noisy
    try:
        runs = [piped_run(trial("noisy"), owners("noisy", stages)) for stages in (2, 3, 4)]
        assert runs[0].losses == runs[1].losses == runs[2].losses
        assert runs[0].losses != single_run(trial("noisy")).losses
    finally:
        del ghost_cases.CASES["noisy"]


def test_a_message_that_nobody_sends_is_an_error_in_time() -> None:
    model = chain()
    pipe = Pipe(
        model,
        Ownership.from_mapping(model, OWNERS),
        stage=2,
        transport=LocalNetwork(timeout_s=0.05).transport(),
    )
    message = r"stage 2 waited 0.05 s for transfer 0 of batch 4 from stage 1"
    with pytest.raises(CommunicationError, match=message), pipe.step(4, None):
        model(torch.ones(2, 4))


def test_the_gradient_of_a_tied_weight_comes_home() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(9, 4)
            self.middle = nn.Linear(4, 4)
            self.out = nn.Linear(4, 9, bias=False)
            self.out.weight = self.embedding.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.middle(self.embedding(x)).tanh())

    tokens = [torch.randint(0, 9, (5,), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    tied = MODELS["packed"]._replace(
        build=Tied, step=lambda model, batch: nn.functional.cross_entropy(model(batch), batch), batches=tokens
    )
    single = single_run(tied)
    del single.state["out.weight"]
    piped: Outcome = piped_run(tied, {"embedding": 0, "middle": 1, "out": 2})
    piped.state.pop("out.weight", None)
    assert_equal(piped, single)


def test_planning_by_equal_counts_cuts_inside_blocks() -> None:
    """The models' tests are about cuts inside blocks: make sure that they are."""
    cut = planned(MODELS["resnet18"], 3)
    assert {stage for name, stage in cut.items() if name.startswith("layer2.1")} != {0, 1, 2}
    assert any(
        len({stage for name, stage in cut.items() if name.startswith(f"layer{layer}.{block}.")}) > 1
        for layer in range(1, 5)
        for block in range(2)
    )
