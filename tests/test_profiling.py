"""Profiles: every layer gets its own time, the layers explain the step, and the model is none the wiser."""

import copy
import itertools
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics.classification import MulticlassAccuracy

import pl_pipe
from pl_pipe.errors import ProfileError
from pl_pipe.graph import LayerNode, Profile, read_profile, write_profile
from pl_pipe.profiling import time_loading
from pl_pipe.profiling.stopwatches import overlapped
from tests.conftest import TIMEOUT_S

X = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
QUICK: dict[str, Any] = {"repeats": 2, "warmup": 0}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def by_module(profile: Profile) -> dict[str, LayerNode]:
    return {node.module: node for node in profile.graph.nodes if node.module}


class SetClock:
    """A clock that only naps move."""

    now = 0.0

    def mark(self) -> float:
        return self.now

    def hold(self, seconds: float) -> None: ...

    def settle(self) -> None: ...

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def recycle(self) -> None: ...


CLOCK = SetClock()


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pl_pipe.profiling.layer_profiler.HostClock", lambda device: CLOCK)


class Nap(torch.autograd.Function):
    """Takes its time: so much in the forward, so much in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        CLOCK.now += forward_s
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        CLOCK.now += ctx.backward_s
        return grad * 1, None, None


class Sleeper(nn.Module):
    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.times = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        return Nap.apply(x * self.weight, *self.times)


class Sleepers(nn.Module):
    """Three layers of known times, a functional one, and a branch whose gradients meet."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Sleeper(1, 20), Sleeper(3, 40), Sleeper(5, 60)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.c(Nap.apply(self.b(h) + h, 7, 80))


def times(profile: Profile) -> dict[str, tuple[float, float]]:
    nodes = {node.module or node.description: node for node in profile.graph.nodes}
    return {name: (round(node.forward_s, 6), round(node.backward_s, 6)) for name, node in nodes.items()}


# ---- times


@pytest.mark.usefixtures("set_clock")
def test_every_layer_gets_its_own_time() -> None:
    profile = pl_pipe.profile(Sleepers(), X, **QUICK)
    wanted = {"Input": (0, 0), "a": (1, 20), "b": (3, 40), "add": (0, 0), "Nap": (7, 80), "c": (5, 60)}
    assert times(profile) == wanted
    assert (profile.step_s, profile.coverage) == (pytest.approx(216), pytest.approx(1))


@pytest.mark.usefixtures("set_clock")
@pytest.mark.parametrize("reentrant", [True, False])
def test_time_of_checkpointed_layers_is_theirs(reentrant: bool) -> None:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        m: Any = model
        return checkpoint(lambda h: m.c(m.b(h)), m.a(batch), use_reentrant=reentrant).mean()

    profile = pl_pipe.profile(Sleepers(), X, step=step, **QUICK)
    # A checkpointed layer runs forward again in the backward pass. The newer form stops as soon as it has all saved
    # tensors again, which is before c naps.
    again = 5 if reentrant else 0
    assert times(profile) == {"Input": (0, 0), "a": (1, 20), "b": (3, 40 + 3), "c": (5, 60 + again), "mean": (0, 0)}
    assert profile.coverage == pytest.approx(1)


@pytest.mark.usefixtures("set_clock")
@pytest.mark.parametrize("reentrant", [True, False])
def test_operations_run_again_are_the_time_of_the_layer_that_asked_for_them(reentrant: bool) -> None:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        m: Any = model
        return checkpoint(lambda h: m.c(Nap.apply(m.b(h), 7, 0)), m.a(batch), use_reentrant=reentrant).mean()

    found = times(pl_pipe.profile(Sleepers(), X, step=step, **QUICK))
    assert (found["b"], found["c"]) == ((3, 40 + 3), (5, 60 + 7 + (5 if reentrant else 0)))


@pytest.mark.usefixtures("set_clock")
def test_a_layer_with_several_outputs_and_a_late_gradient() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = Nap.apply(x * self.weight, 1, 10)
            return Nap.apply(h, 2, 100), Nap.apply(h, 4, 1000)

    model = nn.ModuleDict({"fork": Fork(), "left": Sleeper(8, 20), "right": Sleeper(16, 40)})

    def step(model: Any, batch: Tensor) -> Tensor:
        left, right = model["fork"](batch)
        right = model["right"](right)
        return (model["left"](left) + right).mean()

    found = times(pl_pipe.profile(model, X, step=step, **QUICK))
    assert (found["fork"], found["left"], found["right"]) == ((7, 1110), (8, 20), (16, 40))


@pytest.mark.usefixtures("set_clock")
def test_in_place_changes_and_views_have_their_own_backward() -> None:
    class Shift(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.mark_dirty(x)
            return x.add_(1)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            CLOCK.now += 7
            return grad

    def step(model: Any, batch: Tensor) -> Tensor:
        h = model.a(batch)
        Shift.apply(h)
        Shift.apply(h[:, :2])
        return model.b(h).mean()

    profile = pl_pipe.profile(Sleepers(), X, step=step, **QUICK)
    nodes = [(node.module or node.description, node.backward_s) for node in profile.graph.nodes]
    wanted = [("Input", 0), ("a", 20), ("Shift", 7), ("__getitem__", 0), ("Shift", 7), ("b", 40), ("mean", 0)]
    assert nodes == wanted


@pytest.mark.usefixtures("set_clock")
def test_free_operations_are_the_inputs_time() -> None:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        return model(Nap.apply(batch, 5, 0)).mean()

    profile = pl_pipe.profile(nn.Sequential(nn.Linear(4, 4)), X, step=step, **QUICK)
    assert times(profile) == {"Input": (5, 0), "0": (0, 0), "mean": (0, 0)}


def test_the_cost_of_looking_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ticking(SetClock):
        """Every look takes 1."""

        def mark(self) -> float:
            CLOCK.now += 1
            return CLOCK.now

    monkeypatch.setattr("pl_pipe.profiling.layer_profiler.HostClock", lambda device: Ticking())
    profile = pl_pipe.profile(Sleepers(), X, **QUICK)
    assert times(profile)["Nap"] == (7, 80)
    assert times(profile)["a"] == (1, 20)


@pytest.mark.parametrize(
    ("host_s", "device_s", "wanted"),
    [
        ([1, 1, 1], [5, 6, 7], [5, 6, 7]),  # the device has more to do
        ([5, 6, 7], [1, 1, 1], [5, 6, 7]),  # the host has
        ([1, 1, 9, 1], [6, 1, 1, 1], [6, 1, 4, 1]),  # the host is ahead when it comes to its long layer
    ],
)
def test_host_and_device_overlap(host_s: list[float], device_s: list[float], wanted: list[float]) -> None:
    assert overlapped(host_s, device_s) == wanted


def test_shared_parameters_take_no_time() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    profile = pl_pipe.profile(model, X, **QUICK)
    parameter = profile.graph.nodes[1]
    assert (parameter.description, parameter.module, parameter.compute_s) == ("Parameter", "0.weight", 0.0)
    assert all(node.compute_s > 0 for node in profile.graph.nodes[2:])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first = nn.Embedding(200, 64), nn.LSTM(64, 128, batch_first=True)
        self.second, self.out = nn.LSTM(128, 128, batch_first=True), nn.Linear(128, 200)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.second(self.first(self.embed(tokens))[0])[0])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.embed, self.layers, self.out = nn.Embedding(200, 64), nn.TransformerEncoder(layer, 2), nn.Linear(64, 200)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.layers(self.embed(tokens)))


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        block = [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
        super().__init__(nn.Conv2d(3, 16, 3), *copy.deepcopy(block), *copy.deepcopy(block), nn.AvgPool2d(2))


@pytest.mark.parametrize("build", [Recurrent, Encoder, Convolutions])
def test_layers_explain_the_step(build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the processor's time: a core that others take now and then takes longer for the step than for its layers."""
    monkeypatch.setattr("pl_pipe.profiling.clocks.time", SimpleNamespace(perf_counter=time.thread_time))
    batch = torch.rand(4, 3, 32, 32) if build is Convolutions else torch.randint(0, 200, (8, 24))
    for _ in range(5):
        profile = pl_pipe.profile(build(), batch, repeats=10, warmup=2)
        if 0.85 < profile.coverage < 1.15:
            break
    assert 0.8 < profile.coverage < 1.2


# ---- what a profile says


def test_a_profile_says_what_was_measured(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    profile = pl_pipe.profile(model, X, repeats=4, warmup=1, progress=lambda done, total: calls.append((done, total)))
    assert (profile.model, profile.dtype) == ("Sequential", "float32")
    assert profile.device == f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"
    assert (profile.batch, profile.torch_version) == (("float32[3, 4]",), torch.__version__)
    assert (profile.repeats, profile.data_load_s) == (4, None)
    assert calls == [(done, 5) for done in range(6)]
    assert list(profile.spread) == [node.name for node in profile.graph.nodes]
    for node in profile.graph.nodes:
        low, high = profile.spread[node.name].forward_s
        assert low <= node.forward_s <= high
    assert [node.activation_bytes for node in profile.graph.nodes] == [0, 48, 96, 0]
    write_profile(profile, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile


def test_autocast() -> None:
    profile = pl_pipe.profile(nn.Sequential(nn.Linear(4, 4)), X, autocast_dtype=torch.bfloat16, **QUICK)
    assert profile.dtype == "bfloat16 autocast"
    assert by_module(profile)["0"].output_bytes == (24,)


def test_a_bar_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    pl_pipe.profile(nn.Sequential(nn.Linear(4, 4)), X, progress=True, **QUICK)
    assert capsys.readouterr().err.endswith("] 2/2\n")


def test_importing_the_package_does_not_wait_for_torch() -> None:
    code = "import sys, pl_pipe; assert 'torch' not in sys.modules; assert pl_pipe.profile.__name__ == 'profile'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=TIMEOUT_S)


# ---- forms of batches and steps


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Any]:
        return {"sum": self.layer(x) + (0 if y is None else y), "count": torch.tensor(3)}


@pytest.mark.parametrize("batch", [X, (X, X), [X], {"x": X, "y": X}], ids=["tensor", "tuple", "list", "keywords"])
def test_forms_of_batches(batch: Any) -> None:
    profile = pl_pipe.profile(Sum(), batch, **QUICK)
    assert [node.description for node in profile.graph.nodes if not node.module] == ["Input", "add"]
    assert by_module(profile)["layer"].backward_s > 0


def test_a_batch_with_targets_needs_a_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    batch = (X, torch.tensor([0, 1, 2]))
    with pytest.raises(ProfileError, match=r"holds 2 values, which Sequential.forward\(input.*step="):
        pl_pipe.profile(model, batch, **QUICK)
    profile = pl_pipe.profile(model, batch, step=lambda m, b: F.cross_entropy(m(b[0]), b[1]), **QUICK)
    assert profile.graph.nodes[-1].description == "cross_entropy"


def test_a_step_may_change_its_batch() -> None:
    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch.pop("x").mul_(2)).mean()

    batch = {"x": X.clone()}
    pl_pipe.profile(nn.Sequential(nn.Linear(4, 4)), batch, step=step, **QUICK)
    assert torch.equal(batch["x"], X)


class Classifier(L.LightningModule):
    def __init__(self, step: Callable[["Classifier", Any], Any] | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.accuracy = MulticlassAccuracy(4)
        self.own_step = step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert batch_idx == 0
        if self.own_step is not None:
            return self.own_step(self, batch)
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.log("loss", loss, prog_bar=True)
        self.log("accuracy", self.accuracy)
        self.log_dict({"more": loss * 2})
        return {"loss": loss, "logits": logits.detach()}


LABELLED = (X, torch.tensor([0, 1, 2]))


def test_a_lightning_module(recwarn: pytest.WarningsRecorder) -> None:
    model = Classifier()
    profile = pl_pipe.profile(model, LABELLED, **QUICK)
    assert profile.model == "Classifier"
    assert list(by_module(profile)) == ["net.0", "net.1", "accuracy"]
    assert profile.graph.reads == ()
    assert not [warning for warning in recwarn if "self.log" in str(warning.message)]
    assert "log" not in vars(model)
    assert model.accuracy._update_count == 0
    assert float(model.accuracy.tp.sum()) == 0


def test_a_lightning_module_without_batch_index() -> None:
    class Short(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def training_step(self, batch: Any) -> Any:
            return self.layer(batch).mean()

    assert list(by_module(pl_pipe.profile(Short(), X, **QUICK))) == ["layer"]


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Manual(), r"Manual sets automatic_optimization=False.*pass step="),
        (Classifier(lambda m, b: m.trainer.max_epochs), r"Classifier needs self.trainer.*pass step="),
        (Classifier(lambda m, b: m.net(b[0]).sum() * m.trainer.world_size), r"needs self.trainer.*pass step="),
        (Classifier(lambda m, b: None), r"returned None for this batch.*pass step="),
        (Classifier(lambda m, b: 3), r"returned int where a loss is needed; pass step="),
        (Classifier(lambda m, b: m.net(b[0])), r"has shape \[3, 4\], backward needs one number"),
        (Classifier(lambda m, b: m.net(b[0]).detach().mean()), r"needs no gradient.*remove the detach"),
        (Classifier(lambda m, b: {"logits": m.net(b[0])}), r"returned dict where a loss is needed"),
        (Classifier().requires_grad_(False), r"no parameter that requires a gradient.*requires_grad_\(\)"),
        (Classifier().to("meta"), r"parameters on the meta device"),
        (nn.Sequential(nn.LazyLinear(4)), r"0\.weight of a lazy module has no shape yet"),
    ],
)
def test_steps_that_cannot_be_profiled(model: nn.Module, message: str) -> None:
    with pytest.raises(ProfileError, match=f"(?s){message}"):
        pl_pipe.profile(model, LABELLED, **QUICK)


def test_a_step_that_needs_a_logger() -> None:
    class Logs(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.logger.experiment.add_scalar("x", 1)
            return self.net(batch[0]).mean()

    with pytest.raises(ProfileError, match=r"needs self.logger.*pass step="):
        pl_pipe.profile(Logs(), LABELLED, **QUICK)


def test_the_users_own_errors_stay_theirs() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        pl_pipe.profile(nn.Sequential(nn.Linear(5, 4)), X, **QUICK)


def test_the_mode_is_training_whatever_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
    profile = pl_pipe.profile(model, X, **QUICK)
    assert by_module(profile)["1"].activation_bytes  # a mask is kept
    assert not model.training


def test_gradients_are_on_whatever_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            assert by_module(pl_pipe.profile(model, X, **QUICK))["0"].backward_s > 0
            assert not torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("device", "message"), [("cuda", "sees no CUDA device here; leave device out"), ("mps", "choose cpu or cuda")]
)
def test_devices_that_cannot_be_measured(device: str, message: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ProfileError, match=f"device={device}.*{message}"):
        pl_pipe.profile(nn.Sequential(nn.Linear(4, 4)), X, device=device, **QUICK)


def test_impossible_repeats() -> None:
    with pytest.raises(ProfileError, match="repeats=0 warmup=3"):
        pl_pipe.profile(nn.Sequential(nn.Linear(4, 4)), X, repeats=0)


# ---- nothing changes


class Remembers(nn.Module):
    """Changes whatever a forward can change."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.drop = nn.Embedding(9, 4, max_norm=0.1), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.register_buffer("sparse", torch.eye(4).to_sparse())
        self.calls, self.history = 0, [torch.zeros(1)]
        self.seen: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        random.random()
        np.random.rand()
        h = torch.sparse.mm(self.sparse, self.drop(self.norm(self.embed(tokens))).T).T
        self.history.append(h)
        self.history[0].add_(1)
        self.seen = h
        return h


def test_a_step_that_gives_up_after_so_many_calls_is_measured() -> None:
    """No training has made the calls that the profile makes."""
    torch.manual_seed(0)
    model, tokens = Remembers(), torch.randint(0, 9, (6,))

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        if model.calls >= 3:
            raise ValueError(f"{model.calls} calls are enough")
        return model(batch).mean()

    found = pl_pipe.profile(model, tokens, step=step, **{**QUICK, "repeats": 4})
    assert found.repeats == 4
    assert model.calls == 0


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_the_model_changes(fails: bool) -> None:
    torch.manual_seed(0)
    model, tokens = Remembers(), torch.randint(0, 9, (6,))
    model.norm.eval()
    model(tokens).sum().backward()
    model.drop.forward = own_forward = lambda x: x * 1  # type: ignore[method-assign]
    state = {name: value.clone() for name, value in model.state_dict().items() if not value.is_sparse}
    tensors = {name: id(value) for name, value in (*model.named_parameters(), *model.named_buffers())}
    grads = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters()}
    attributes, history, first = {**vars(model)}, list(model.history), model.history[0].clone()
    versions = [parameter._version for parameter in model.norm.parameters()]
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
    runs = itertools.count()

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch).mean()
        if fails and next(runs) >= 3:
            raise ValueError("in the middle")
        return out

    try:
        pl_pipe.profile(model, tokens, step=step, **QUICK)
        assert not fails
    except ValueError:
        assert fails
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    assert tensors == {name: id(value) for name, value in (*model.named_parameters(), *model.named_buffers())}
    for name, parameter in model.named_parameters():
        assert parameter.grad is grads[name][0]
        assert torch.equal(parameter.grad, grads[name][1])
    assert versions == [parameter._version for parameter in model.norm.parameters()]
    assert {name: value for name, value in vars(model).items() if value is not attributes[name]} == {}
    assert vars(model).keys() == attributes.keys()
    assert [id(entry) for entry in model.history] == [id(entry) for entry in history]
    assert torch.equal(model.history[0], first)
    assert (model.training, model.norm.training, model.calls) == (True, False, 1)
    assert model.drop.forward is own_forward
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    np.testing.assert_equal(np.random.get_state(), generators[2])
    assert torch._C._len_torch_function_stack() == 0


def test_a_graph_from_before_can_still_run_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def step(model: Any, batch: Tensor) -> Tensor:
        model[1].weight.data.mul_(2)  # unseen by autograd, unlike our putting it back could be
        return model(batch).mean()

    before = model[1].weight.detach().clone()
    loss = model(X).mean()
    pl_pipe.profile(model, X, step=step, **QUICK)
    assert torch.equal(model[1].weight, before)
    loss.backward()


# ---- control flow that changes


class Chooses(nn.Module):
    def __init__(self, skips: Callable[["Chooses"], bool]) -> None:
        super().__init__()
        self.a, self.b, self.skips, self.calls = nn.Linear(4, 4), nn.Tanh(), skips, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.a(x)
        return h if self.skips(self) else self.b(h)


@pytest.mark.parametrize(
    "skips",
    [lambda m: bool(torch.rand(()) < 0.5), lambda m: random.random() < 0.5, lambda m: m.calls > 1],
    ids=["torch's random numbers", "Python's", "a count of its own"],
)
def test_layers_left_out_by_chance_are_left_out_of_every_pass(skips: Callable[[Chooses], bool]) -> None:
    model = Chooses(skips)
    profile = pl_pipe.profile(model, X, repeats=6, warmup=0)
    assert list(by_module(profile)) in (["a"], ["a", "b"])
    assert model.calls == 0


def test_layers_that_never_agree_are_refused() -> None:
    calls: list[int] = []

    def skips(model: Chooses) -> bool:
        calls.append(1)
        return len(calls) > 1

    with pytest.raises(ProfileError, match=r"layer 2 was b Tanh\(\) and then nothing; fix the choice"):
        pl_pipe.profile(Chooses(skips), X, **QUICK)


# ---- loading


def test_time_to_fetch_a_batch() -> None:
    def loader(count: int) -> Any:
        time.sleep(0.05)  # starts its workers
        for _ in range(count):
            time.sleep(0.004)
            yield X

    assert 0.004 <= time_loading(loader(20), batches=5) < 0.03
    assert time_loading(loader(1)) > 0.05
    with pytest.raises(ProfileError, match="gave no batch"):
        time_loading([])
    with pytest.raises(ProfileError, match="batches=0"):
        time_loading(loader(3), batches=0)


# ---- other devices


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_model_is_moved_and_moved_back() -> None:
    model = Remembers()
    model(torch.randint(0, 9, (6,))).sum().backward()
    before = {name: (v.data_ptr(), v.clone()) for name, v in model.state_dict().items() if not v.is_sparse}
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    profile = pl_pipe.profile(model, torch.randint(0, 9, (6,)), device="cuda", **QUICK)
    assert profile.device.startswith("cuda")
    assert by_module(profile)["norm"].backward_s > 0
    assert model.sparse.device.type == "cpu"
    for name, (address, value) in before.items():
        assert model.state_dict()[name].data_ptr() == address
        assert torch.equal(model.state_dict()[name], value)
    assert all(parameter.grad is grads[name] for name, parameter in model.named_parameters())
