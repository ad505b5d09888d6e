"""Recorded steps: the layers and dependencies a reader of the model would draw, and not a bit changed by looking."""

import dataclasses
import importlib.util
import threading
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.autograd.function import _SingleLevelFunction
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from pl_pipe.errors import ProfileError
from pl_pipe.graph import LayerNode, format_graph, parse_graph
from pl_pipe.tensors import Recorder, Recording

Step = Callable[[nn.Module, Any], Any]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def call(model: nn.Module, batch: Any) -> Any:
    return model(batch)


def run(model: nn.Module, batch: Any, step: Step) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs and gradients of one seeded step."""
    torch.manual_seed(7)
    model.zero_grad(set_to_none=True)
    outputs = _outputs(step(model, batch))
    _total(outputs).backward()
    return outputs, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def record(model: nn.Module, batch: Any, step: Step = call) -> Recording:
    """Records a step, and checks that recording it changed neither results nor gradients nor left anything behind."""
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    forwards = [vars(module).get("forward") for module in model.modules()]
    plain, plain_grads = run(model, batch, step)
    after = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, buffer in model.named_buffers():
        buffer.copy_(state[name])
    recorder = Recorder(model, batch)

    def recorded(model: nn.Module, batch: Any) -> Any:
        with recorder:
            return step(model, batch)

    outputs, grads = run(model, batch, recorded)
    assert len(outputs) == len(plain)
    assert all(torch.equal(one, other) for one, other in zip(outputs, plain, strict=True))
    assert grads.keys() == plain_grads.keys()
    assert all(torch.equal(grads[name], plain_grads[name]) for name in grads)
    assert all(torch.equal(buffer, after[name]) for name, buffer in model.named_buffers())
    assert [vars(module).get("forward") for module in model.modules()] == forwards
    check_nothing_left(model)
    recording = recorder.recording()
    check_graph(recording)
    return recording


def check_nothing_left(model: nn.Module) -> None:
    assert torch._C._len_torch_function_stack() == 0
    assert "apply" not in vars(_SingleLevelFunction)
    assert not [name for name, tensor in model.named_parameters() if vars(tensor)]


def check_graph(recording: Recording) -> None:
    graph = recording.graph
    position = {node.name: index for index, node in enumerate(graph.nodes)}
    assert [node.name for node in graph.nodes] == [f"node{index}" for index in range(len(graph.nodes))]
    assert graph.nodes[0].description == "Input"
    assert all(position[source] < position[target] for source, target in graph.edges)
    assert len(set(graph.edges)) == len(graph.edges)
    text = format_graph(graph)
    assert format_graph(parse_graph(text)[0]) == text
    assert [node.description for node in parse_graph(text)[0].nodes] == [node.description for node in graph.nodes]


def picture(recording: Recording) -> str:
    """One line a node: what it is, and what it takes. The second node of a name is `name#2`."""
    labels: dict[str, str] = {}
    seen: dict[str, int] = {}
    for node in recording.graph.nodes:
        label = f"*{node.module}" if node.description == "Parameter" else node.module or node.description
        seen[label] = seen.get(label, 0) + 1
        labels[node.name] = label if seen[label] == 1 else f"{label}#{seen[label]}"
    lines = []
    for node in recording.graph.nodes:
        sources = [labels[source] for source, target in recording.graph.edges if target == node.name]
        lines.append(" ".join([labels[node.name], *(["<-", *sources] if sources else [])]))
    return "\n".join(lines)


def drawn(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def node(recording: Recording, label: str) -> LayerNode:
    (found,) = [n for n in recording.graph.nodes if label in (n.module, n.description)]
    return found


def leaf_calls(model: nn.Module, batch: Any, step: Step = call) -> int:
    """Calls of leaf modules, counted without our code."""
    calls: list[nn.Module] = []
    leaves = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention) or not list(m.children())]
    hooks = [leaf.register_forward_hook(lambda module, *_: calls.append(module)) for leaf in leaves]
    step(model, batch)
    for hook in hooks:
        hook.remove()
    return len(calls)


def modules_in(recording: Recording) -> list[str]:
    return [n.module for n in recording.graph.nodes if n.module and n.description != "Parameter"]


def _outputs(outcome: Any) -> list[Tensor]:
    if isinstance(outcome, Tensor):
        return [outcome]
    values = outcome.values() if isinstance(outcome, dict) else outcome if isinstance(outcome, tuple | list) else ()
    if dataclasses.is_dataclass(outcome):
        values = [getattr(outcome, field.name) for field in dataclasses.fields(outcome)]
    return [tensor for value in values for tensor in _outputs(value)]


def _total(outputs: list[Tensor]) -> Tensor:
    return torch.stack([o.float().tanh().pow(2).mean() for o in outputs if o.requires_grad]).sum()


class Net(nn.Module):
    """Three layers and a step written by the test."""

    def __init__(self, forward: Callable[["Net", Any], Any], **modules: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)
        for name, module in modules.items():
            self.add_module(name, module)
        self.steps = forward

    def forward(self, x: Any) -> Any:
        return self.steps(self, x)


X = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))


def record_net(forward: Callable[[Net, Any], Any], batch: Any = X, **modules: nn.Module) -> Recording:
    return record(Net(forward, **modules), batch)


# ---- what is a layer, and what it depends on


def test_a_residual_block() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        h = m.a(x)
        return m.c(m.b(h) + h)

    recording = record_net(forward)
    assert picture(recording) == drawn("""
        Input
        a <- Input
        b <- a
        add <- a b
        c <- add
    """)
    assert [n.output_bytes for n in recording.graph.nodes] == [(48,)] * 5
    assert [n.parameter_bytes for n in recording.graph.nodes] == [0, 80, 80, 0, 80]
    assert recording.layer_names == ("node0", "node1", "node2", "node3", "node4")
    assert recording.unused_parameters == ()


def test_what_depends_on_the_batch_alone_is_free() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        mask = (x > 0.5).float() * torch.arange(4)
        return m.b(m.a(x - 0.5) * mask[:, :4])

    assert picture(record_net(forward)) == drawn("""
        Input
        a <- Input
        mul <- Input a
        b <- mul
    """)


def test_shapes_devices_and_types_are_no_layers() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        h = m.a(x)
        assert h.is_floating_point()
        assert (h.ndim, h.dim(), len(h), h.requires_grad) == (2, 2, 3, True)
        return m.b(h + torch.zeros(h.shape[0], h.size(1), device=h.device, dtype=h.dtype)) * h.numel()

    recording = record_net(forward)
    assert [n.description for n in recording.graph.nodes if not n.module] == ["Input", "add", "mul"]
    assert recording.graph.reads == ()


def test_operations_have_plain_names() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        h = m.a(x)
        h = 1 - h / 2 + 2 / (h * h + 1) + (h.T @ h)[:3]
        h = torch.cat([h, F.relu(h)], 1).flatten(1).T
        h += 1
        h[0] = 2
        return h

    names = [n.description for n in record_net(forward).graph.nodes if not n.module]
    assert names == [
        *("Input", "div", "rsub", "mul", "add", "div", "add", "T", "matmul", "__getitem__", "add"),
        *("relu", "cat", "flatten", "T", "add_", "__setitem__"),
    ]


def test_operations_on_parameters_and_buffers_are_layers() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2, 4))
            self.register_buffer("shift", torch.ones(4))
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            scale = self.scale[0].exp()
            return self.a(x) * scale + self.shift.neg()

    recording = record(Scaled(), X)
    assert picture(recording) == drawn("""
        Input
        __getitem__
        exp <- __getitem__
        a <- Input
        mul <- exp a
        neg
        add <- mul neg
    """)
    assert node(recording, "__getitem__").parameter_bytes == 32
    assert recording.graph.parameter_bytes == 32 + 80


def test_a_leaf_that_hands_out_its_parameter() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self) -> Tensor:
            return self.scale

    assert picture(record_net(lambda m, x: m.a(x) * m.scale(), scale=Scale())) == drawn("""
        Input
        a <- Input
        *scale.scale
        scale <- *scale.scale
        mul <- a *scale.scale
    """)


def test_constants_that_a_leaf_keeps_are_its_own() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by, self.parts = torch.ones(4), [torch.ones(4)]

        def forward(self, x: Tensor) -> Tensor:
            return x + self.by + self.parts[0]

    assert picture(record_net(lambda m, x: m.shift(m.a(x)), shift=Shift())) == drawn("""
        Input
        a <- Input
        shift <- a
    """)


def test_a_root_that_is_a_leaf_is_its_operations() -> None:
    assert picture(record(nn.Linear(4, 4), X)) == drawn("""
        Input
        linear <- Input
    """)


def test_descriptions_stand_on_one_line() -> None:
    recording = record_net(lambda m, x: m.c(m.mha(x, x, x)[0]), mha=nn.MultiheadAttention(4, 2))
    assert node(recording, "mha").description.startswith("MultiheadAttention( (out_proj): NonDynamically")
    assert modules_in(recording) == ["mha", "c"]


# ---- in-place changes and views


def test_in_place_changes_are_new_values() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        h = m.a(x) * 1
        h.add_(1)
        m.relu(h)
        return m.b(h)

    assert picture(record_net(forward)) == drawn("""
        Input
        a <- Input
        mul <- a
        add_ <- mul
        relu <- add_
        b <- relu
    """)


def test_a_change_through_a_view_reaches_its_base_and_its_other_views() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        h = m.a(x) * 1
        flat = h.view(-1)
        h[:, :2].mul_(3)
        return m.b(h) + m.c(flat.view(3, 4))

    recording = record_net(forward)
    assert picture(recording) == drawn("""
        Input
        a <- Input
        mul <- a
        view <- mul
        __getitem__ <- mul
        mul_ <- __getitem__
        b <- mul_
        view#2 <- view mul_
        c <- view#2
        add <- b c
    """)
    assert node(recording, "mul_").output_bytes == (48,)


def test_a_change_through_a_detached_alias_is_seen() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        h = m.a(x) * 1
        with torch.no_grad():
            h.data.mul_(2)
        return m.b(h)

    assert "b <- mul_" in picture(record_net(forward)).splitlines()


def test_a_free_buffer_filled_by_layers_depends_on_them() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        out = torch.zeros(2, 3, 4)
        row = out[0]
        row.copy_(m.a(x))
        out[1] = m.b(x)
        return m.c(out)

    assert picture(record_net(forward)) == drawn("""
        Input
        a <- Input
        copy_ <- Input a
        b <- Input
        __setitem__ <- copy_ b
        c <- __setitem__
    """)


def test_out_arguments_are_written() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        out = torch.empty(3, 4)
        with torch.no_grad():
            torch.add(m.a(x), 1, out=out)
        return m.b(out)

    assert "b <- add" in picture(record_net(forward)).splitlines()


def test_identity_hands_its_input_on() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.b(m.same(m.a(m.first(x))))

    recording = record_net(forward, same=nn.Identity(), first=nn.Identity())
    assert picture(recording) == drawn("""
        Input
        first <- Input
        a <- Input
        same <- a
        b <- same
    """)


def test_batch_norm_called_twice_keeps_its_statistics_in_order() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.norm(m.a(x)) + m.norm(m.b(x))

    recording = record_net(forward, norm=nn.BatchNorm1d(4, affine=False))
    assert "norm#2 <- norm b" in picture(recording).splitlines()


# ---- containers


@dataclasses.dataclass
class Both:
    hidden: Tensor
    more: dict[str, Any]


Pair = namedtuple("Pair", "left right")


class Plain:
    def __init__(self, value: Tensor) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("pack", "unpack"),
    [
        (lambda h, g: (h, [g]), lambda p: (p[0], p[1][0])),
        (lambda h, g: {"h": h, "g": (g,)}, lambda p: (p["h"], p["g"][0])),
        (Pair, lambda p: (p.left, p.right)),
        (lambda h, g: Both(h, {"g": g}), lambda p: (p.hidden, p.more["g"])),
        (lambda h, g: (Plain(h), Plain(g)), lambda p: (p[0].value, p[1].value)),
    ],
    ids=["tuple", "dict", "namedtuple", "dataclass", "object"],
)
def test_containers_in_and_out_of_a_leaf(pack: Any, unpack: Any) -> None:
    class Swap(nn.Module):
        def forward(self, packed: Any) -> Any:
            h, g = unpack(packed)
            return pack(g * 1, h * 1)

    def forward(m: Net, x: Tensor) -> Tensor:
        g, h = unpack(m.swap(pack(m.a(x), m.b(x))))
        return m.c(g) + h

    recording = record_net(forward, swap=Swap())
    assert picture(recording) == drawn("""
        Input
        a <- Input
        b <- Input
        swap <- a b
        c <- swap
        add <- swap c
    """)
    assert node(recording, "swap").output_bytes == (48, 48)


def test_packed_sequences() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm, self.out = nn.Embedding(9, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 9)

        def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            tokens, lengths = batch
            packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
            h, back = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
            assert back.tolist() == lengths.tolist()
            return self.out(h)

    recording = record(Packed(), (torch.randint(0, 9, (3, 5)), torch.tensor([2, 5, 3])))
    assert recording.graph.reads == ()  # lengths belong to the batch
    assert modules_in(recording) == ["embed", "lstm", "out"]
    assert nx.has_path(recording.graph.digraph, node(recording, "embed").name, node(recording, "out").name)
    assert node(recording, "lstm").output_bytes == (10 * 4 * 4, 3 * 4 * 4, 3 * 4 * 4)


def test_states_that_leaves_keep_are_followed() -> None:
    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = x * 2
            return x + 1

    def forward(m: Net, x: Tensor) -> Tensor:
        h = m.keeps(m.a(x))
        return m.b(h.detach()) + m.keeps.kept

    assert "add <- keeps b" in picture(record_net(forward, keeps=Keeps())).splitlines()


def test_weights_computed_by_a_hook_are_followed() -> None:
    normed = torch.nn.utils.spectral_norm(nn.Linear(4, 4))
    recording = record_net(lambda m, x: m.normed(m.a(x)), normed=normed)
    weight, layer = node(recording, "normed.weight_orig"), node(recording, "normed")  # used by two operations
    assert nx.has_path(recording.graph.digraph, weight.name, layer.name)
    assert layer.parameter_bytes == 16  # the bias


# ---- parameters used more than once


class Tied(nn.Module):
    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.embed, self.mid = nn.Embedding(9, 4), nn.Linear(4, 4)
        self.functional = functional
        if not functional:
            self.head = nn.Linear(4, 9, bias=False)
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.mid(self.embed(tokens))
        return F.linear(h, self.embed.weight) if self.functional else self.head(h)


@pytest.mark.parametrize("functional", [True, False])
def test_tied_weights_are_a_node_of_their_own(functional: bool) -> None:
    recording = record(Tied(functional), torch.randint(0, 9, (2, 3)))
    head = "linear" if functional else "head"
    assert picture(recording) == drawn(f"""
        Input
        *embed.weight <- Input
        embed <- Input *embed.weight
        mid <- embed
        {head} <- *embed.weight mid
    """)
    weight = recording.graph.nodes[1]
    assert (weight.parameter_bytes, weight.output_bytes, weight.forward_s) == (144, (144,), 0.0)
    assert [n.parameter_bytes for n in recording.graph.nodes] == [0, 144, 0, 80, 0]
    assert recording.layer_names == ("node0", "node2", "node3", "node4")


def test_a_module_called_twice_has_two_layers_and_its_parameters_once() -> None:
    recording = record_net(lambda m, x: m.b(m.a(m.a(x))))
    assert picture(recording) == drawn("""
        Input
        *a.weight <- Input
        *a.bias <- Input
        a <- Input *a.weight *a.bias
        a#2 <- *a.weight *a.bias a
        b <- a#2
    """)
    assert recording.graph.parameter_bytes == 160
    assert recording.unused_parameters == ("c.weight", "c.bias")


def test_a_module_without_parameters_called_twice_needs_none() -> None:
    recording = record_net(lambda m, x: m.b(m.drop(m.drop(m.a(x)))), drop=nn.Dropout(0.5))
    assert modules_in(recording) == ["a", "drop", "drop", "b"]
    assert "Parameter" not in {n.description for n in recording.graph.nodes}


# ---- memory


def test_memory_kept_for_backward() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        h = m.a(x)  # keeps x
        g = h.exp()  # keeps its result
        return m.b(g).view(-1)  # keeps g, which is counted already; a view keeps nothing

    recording = record_net(forward)
    assert [n.activation_bytes for n in recording.graph.nodes] == [0, 48, 48, 0, 0]


def test_memory_is_not_measured_when_not_asked_for() -> None:
    model = Net(lambda m, x: m.a(x))
    with Recorder(model, X, measure_memory=False) as recorder:
        model(X)
    assert [n.activation_bytes for n in recorder.recording().graph.nodes] == [None, None]


# ---- reads of values


def test_reads_name_the_layer_and_the_line() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        if x.sum().item() < 0 or bool((x > 2).any()):  # the batch's own values: free
            return m.c(x)
        h = m.a(x)
        g = m.b(h)
        if h.sum() > -1e9:
            g = g + 1
        f"{g.mean()}"
        return m.c(g)

    recording = record_net(forward)
    first = forward.__code__.co_firstlineno
    assert [(read.layer, read.after, read.line) for read in recording.graph.reads] == [
        (node(recording, "gt").name, node(recording, "gt").name, f"test_recording.py:{first + 5}"),
        (node(recording, "mean").name, node(recording, "mean").name, f"test_recording.py:{first + 7}"),
    ]
    assert picture(recording).splitlines()[3:5] == ["sum <- a", "gt <- sum"]


@pytest.mark.parametrize(
    "read",
    [
        lambda h: h[0, 0].item(),
        lambda h: h.tolist(),
        lambda h: float(h.sum()),
        lambda h: int(h.sum()),
        lambda h: h.detach().numpy(),
        lambda h: 0.5 in h,
        lambda h: torch.equal(h, h),
        lambda h: torch.allclose(h, h),
        lambda h: f"{h}",
        lambda h: repr(h),
        lambda h: range(h.argmax()),
    ],
    ids=["item", "tolist", "float", "int", "numpy", "in", "equal", "allclose", "format", "repr", "index"],
)
def test_every_way_to_read(read: Callable[[Tensor], Any]) -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        read(x)
        h = m.a(x)
        read(h)
        return m.b(h)

    assert len(record_net(forward).graph.reads) == 1


def test_a_read_inside_another_library_names_its_line() -> None:
    from torchmetrics.functional import accuracy

    def forward(m: Net, x: Tensor) -> Tensor:
        h = m.a(x)
        accuracy(h.softmax(-1)[:, 0], torch.tensor([0, 1, 1]), task="binary")
        return h

    (read, *_) = record_net(forward).graph.reads
    assert not read.line.startswith("test_recording.py")


def test_iterating_and_unpacking_is_no_read() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        first, second, third = m.a(x)
        return torch.stack([m.b(row) for row in (first, second, third)])

    recording = record_net(forward)
    assert recording.graph.reads == ()
    assert "b#3 <- unbind *b.weight *b.bias" in picture(recording).splitlines()


# ---- autograd functions, checkpoints, extensions


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x + x) * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        assert ctx.saved_tensors
        return grad * 2


double = Double.apply  # as many extensions write it


@pytest.mark.parametrize("apply", [double, lambda x: Double.apply(x)], ids=["bound", "looked up"])
def test_custom_autograd_functions_are_one_layer(apply: Callable[[Tensor], Tensor]) -> None:
    before = torch.autograd.Function.apply
    recording = record_net(lambda m, x: m.b(apply(m.a(apply(x)))))
    assert picture(recording) == drawn("""
        Input
        a <- Input
        Double <- a
        b <- Double
    """)
    assert torch.autograd.Function.apply == before
    assert node(recording, "Double").activation_bytes == 48


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_show_the_layers_inside(reentrant: bool) -> None:
    def region(m: Net, h: Tensor) -> Tensor:
        return m.c(m.relu(m.b(h) + 1))

    def forward(m: Net, x: Tensor) -> Tensor:
        h = m.a(x)
        return checkpoint(region, m, h, use_reentrant=reentrant) + h

    recording = record_net(forward)
    assert picture(recording) == drawn("""
        Input
        a <- Input
        b <- a
        add <- b
        relu <- add
        c <- relu
        add#2 <- a c
    """)
    inside = [n.activation_bytes for n in recording.graph.nodes[2:5]]
    assert inside == [0, 0, 0]  # nothing is kept: it is computed again


def test_tensors_out_of_functions_that_no_mode_sees() -> None:
    @torch.jit.script
    def scripted(x: Tensor) -> Tensor:
        return torch.sin(x) + 1

    assert "b <- a" in picture(record_net(lambda m, x: m.b(scripted(m.a(x))))).splitlines()


def test_layers_inside_vmap() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.c(torch.vmap(lambda row: m.b(row) * 2)(m.a(x)))

    assert picture(record_net(forward)) == drawn("""
        Input
        a <- Input
        b <- a
        mul <- b
        c <- mul
    """)


def test_a_leaf_that_calls_another_through_a_plain_reference() -> None:
    class Calls(nn.Module):
        def __init__(self, other: nn.Module) -> None:
            super().__init__()
            self.others = [other]

        def forward(self, x: Tensor) -> Tensor:
            return self.others[0](x) + 1

    model = Net(lambda m, x: m.calls(m.a(x)))
    model.calls = Calls(model.b)
    recording = record(model, X)
    assert picture(recording) == "Input\na <- Input\ncalls <- a"
    assert node(recording, "calls").parameter_bytes == 80
    assert recording.unused_parameters == ("c.weight", "c.bias")


def test_a_scripted_module_is_one_layer() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert scripted(X).shape == X.shape  # it keeps its forward from now on
    recording = record_net(lambda m, x: m.b(m.scripted(x)), scripted=scripted)
    assert modules_in(recording) == ["scripted", "b"]
    assert node(recording, "scripted").parameter_bytes == 80


def test_a_default_device_stays_in_force_inside_leaves() -> None:
    class Makes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert torch.zeros(1).device.type == "meta"
            return x * 1

    model = nn.Sequential(Makes())
    with torch.device("meta"), Recorder(model, X):
        model(X)
        assert torch.zeros(1).device.type == "meta"


def test_autocast() -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch)

    recording = record(Net(lambda m, x: m.c(m.b(m.a(x)) + 1)), X, step)
    assert [n.output_bytes for n in recording.graph.nodes] == [(48,)] + [(24,)] * 4


def test_other_threads_are_not_recorded() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        thread = threading.Thread(target=m.c, args=(x,))
        thread.start()
        thread.join()
        return m.a(x)

    assert modules_in(record_net(forward)) == ["a"]


def test_lazy_modules_are_refused() -> None:
    with pytest.raises(ProfileError, match=r"0\.weight of a lazy module has no shape yet; run one batch"):
        Recorder(nn.Sequential(nn.LazyLinear(3)), X)


# ---- after an exception


def test_everything_is_put_back_after_an_exception() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("in the middle")

    model = Net(lambda m, x: m.fails(m.a(x)), fails=Fails())
    own_forward = lambda x: x * 2  # noqa: E731
    model.b.forward = own_forward  # type: ignore[method-assign]
    before = torch.autograd.Function.apply
    with pytest.raises(ValueError, match="in the middle"), Recorder(model, X):
        model(X)
    assert model.b.forward is own_forward
    assert not [name for name, module in model.named_modules() if "forward" in vars(module) and name != "b"]
    check_nothing_left(model)
    assert torch.autograd.Function.apply == before
    assert picture(record(Net(lambda m, x: m.a(x)), X)) == "Input\na <- Input"


def test_an_exception_that_the_step_handles() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError

    def forward(m: Net, x: Tensor) -> Tensor:
        try:
            return m.fails(x)
        except ValueError:
            return m.b(m.a(x) + 1)

    assert picture(record_net(forward, fails=Fails())) == drawn("""
        Input
        a <- Input
        add <- a
        b <- add
    """)


# ---- whole models


def lstm_translator() -> tuple[nn.Module, Any, Step]:
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 8)
            self.encoder = nn.LSTM(8, 4, bidirectional=True, batch_first=True)
            self.decoder, self.attend = nn.LSTMCell(8, 8), nn.Linear(8, 8)
            self.out = nn.Linear(16, 20)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            memory, (h, c) = self.encoder(self.embed(source))
            state = (torch.cat([h[0], h[1]], -1), torch.cat([c[0], c[1]], -1))
            logits = []
            for token in self.embed(target).unbind(1):
                state = self.decoder(token, state)
                weights = (memory @ self.attend(state[0]).unsqueeze(-1)).softmax(1)
                logits.append(self.out(torch.cat([state[0], (weights * memory).sum(1)], -1)))
            return torch.stack(logits, 1)

    tokens = torch.randint(0, 20, (3, 5))
    return Translator(), (tokens, tokens[:, :3]), lambda m, b: F.cross_entropy(m(*b).flatten(0, 1), b[1].flatten())


def transformer() -> tuple[nn.Module, Any, Step]:
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    return model, (torch.rand(2, 3, 8), torch.rand(2, 4, 8)), lambda m, b: m(*b, tgt_mask=mask, tgt_is_causal=True)


def lightning_transformer() -> tuple[nn.Module, Any, Step]:
    from lightning.pytorch.demos.transformer import Transformer

    tokens = torch.randint(0, 30, (2, 5))
    model = Transformer(vocab_size=30, ninp=8, nhead=2, nhid=8, nlayers=1)
    return model, (tokens, tokens.roll(-1, 1)), lambda m, b: F.nll_loss(m(*b), b[1].view(-1))


def autoencoder() -> tuple[nn.Module, Any, Step]:
    model = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(4, 2), nn.ReLU()), "decoder": nn.Linear(2, 4)})

    def step(model: Any, batch: Tensor) -> Tensor:
        code = model["encoder"](batch)
        return F.mse_loss(model["decoder"](code), batch) + 0.1 * code.abs().mean()

    return model, X, step


def vae() -> tuple[nn.Module, Any, Step]:
    model = nn.ModuleDict({"encoder": nn.Linear(4, 4), "decoder": nn.Linear(2, 4)})

    def step(model: Any, batch: Tensor) -> Tensor:
        mean, log_variance = model["encoder"](batch).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).mean()
        return F.mse_loss(model["decoder"](z), batch) + divergence

    return model, X, step


@pytest.mark.parametrize("build", [lstm_translator, transformer, lightning_transformer, autoencoder, vae])
def test_models(build: Callable[[], tuple[nn.Module, Any, Step]]) -> None:
    torch.manual_seed(0)
    model, batch, step = build()
    recording = record(model, batch, step)
    assert len(modules_in(recording)) == leaf_calls(model, batch, step)
    assert recording.graph.parameter_bytes == sum(p.numel() * 4 for p in model.parameters())
    assert recording.unused_parameters == ()
    assert recording.graph.reads == ()
    if build is not transformer:  # one result: everything leads to the loss, from the batch or a parameter
        loss = recording.graph.nodes[-1].name
        assert set(recording.graph.digraph) - nx.ancestors(recording.graph.digraph, loss) == {loss}


VISION: dict[str, dict[str, Any]] = {
    "resnet18": {},
    "vgg11_bn": {},
    "densenet121": {},
    "mobilenet_v3_small": {},
    "googlenet": {"init_weights": False, "size": 64},
    "inception_v3": {"init_weights": False, "aux_logits": False, "size": 75},
    "vit_b_32": {"image_size": 64, "size": 64},
    "swin_t": {},
    "convnext_tiny": {},
    "squeezenet1_1": {},
    "shufflenet_v2_x0_5": {},
    "efficientnet_b0": {},
}


@pytest.mark.parametrize("name", VISION)
def test_vision_models(name: str) -> None:
    options = dict(VISION[name])
    images = torch.rand(2, 3, *[options.pop("size", 32)] * 2)
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, num_classes=10, **options)
    recording = record(model, images)
    assert len(modules_in(recording)) == leaf_calls(model, images)
    assert recording.graph.parameter_bytes == sum(p.numel() * 4 for p in model.parameters())
    assert recording.unused_parameters == ()


@pytest.mark.parametrize("name", ["resnet18", "densenet121", "mobilenet_v3_small"])
def test_dependencies_are_those_of_symbolic_tracing(name: str) -> None:
    model = torchvision.models.get_model(name, num_classes=10)
    with Recorder(model, X) as recorder, torch.no_grad():
        model(torch.rand(2, 3, 32, 32))
    graph = recorder.recording().graph
    traced = nx.DiGraph()
    for fx_node in torch.fx.symbolic_trace(model).graph.nodes:
        traced.add_node(fx_node)
        traced.add_edges_from((source, fx_node) for source in fx_node.all_input_nodes)
    wanted = {
        (source.target, target.target)
        for target in traced
        if target.op == "call_module"
        for source in nx.ancestors(traced, target)
        if source.op == "call_module"
    }
    found = {
        (graph.by_name[source].module, target.module)
        for target in graph.nodes
        if target.module
        for source in nx.ancestors(graph.digraph, target.name)
        if graph.by_name[source].module
    }
    assert found == wanted


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_a_bert_of_hugging_face() -> None:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=30, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
    model = BertForMaskedLM(config)
    tokens = torch.randint(0, 30, (2, 6))
    recording = record(model, {"input_ids": tokens, "labels": tokens}, lambda m, b: m(**b).loss)
    assert len(modules_in(recording)) == leaf_calls(model, tokens, lambda m, b: m(b, labels=b))
    assert [n.module for n in recording.graph.nodes if n.description == "Parameter"] == [
        "bert.embeddings.word_embeddings.weight"
    ]
