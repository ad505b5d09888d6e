"""What fused training is measured against: training steps of plain models, made as quick as torch makes them.

serial eager       one model, operation by operation
serial compiled    one model, torch.compile, the whole step as a CUDA graph
vmap               all models as one, by torch.func
branches           all models, torch.compile, parallel streams of one CUDA graph
mps                one process a model, each as serial compiled; the driver starts them (gpu.py)

All are trainings: every step has another batch, which the models of a step share. Nobody keeps their losses.
"""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from workloads import TENSOR_CORES, WORKLOADS, batch_of, build, loss_of

Step = Callable[[], None]
Batch = tuple[Tensor, Tensor]


def peer(name: str, mode: str, variants: int, precision: str, device: str, *, small: bool = False) -> tuple[Step, int]:
    """A step, and how many models it trains."""
    first, *others = (batch_of(name, device, small=small) for _ in range(3))

    def plain(*, compiles: bool) -> Step:
        return _step(name, first, precision, device, small, compiles=compiles)

    if mode == "serial eager":
        return fed(plain(compiles=False), first, others), 1
    if mode == "serial compiled":
        return fed(captured(plain(compiles=True)), first, others), 1
    if mode == "vmap":
        return fed(captured(_vmapped(name, first, variants, precision, device, small)), first, others), variants
    if mode == "branches":
        steps = [plain(compiles=True) for _ in range(variants)]
        return fed(captured(_parallel(steps)), first, others), variants
    raise ValueError(f"{mode} is no peer")


def fed(step: Step, read: Batch, others: list[Batch]) -> Step:
    """A step that finds the next of the others where it reads."""
    turn = itertools.cycle(others)

    def one() -> None:
        for static, given in zip(read, next(turn), strict=True):
            static.copy_(given, non_blocking=True)
        step()

    return one


def captured(step: Step) -> Step:
    """The step as a CUDA graph; elsewhere as it is."""
    if not torch.cuda.is_available():
        return step
    side: Any = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    graph.keep = step  # type: ignore[attr-defined]
    return graph.replay


def _model(name: str, device: str, small: bool) -> nn.Module:
    with torch.device(device):
        model = build(name, small=small)
    return model.to(memory_format=TENSOR_CORES) if WORKLOADS[name].channels_last else model  # type: ignore[call-overload, no-any-return]


def _adam(parameters: Any, device: str) -> torch.optim.Optimizer:
    on_gpu = device.startswith("cuda")
    return torch.optim.Adam(parameters, lr=1e-3, fused=on_gpu, capturable=on_gpu)


def _autocast(precision: str, device: str) -> Any:
    return torch.autocast(device.split(":")[0], torch.bfloat16, enabled=precision == "bf16")


def _step(name: str, batch: Batch, precision: str, device: str, small: bool, *, compiles: bool) -> Step:
    model = _model(name, device, small)
    x, y = batch
    optimizer = _adam(model.parameters(), device)

    def loss_now() -> Any:
        with _autocast(precision, device):
            return loss_of(name, model(x), y)

    torch._dynamo.config.recompile_limit = 64
    run = torch.compile(loss_now, dynamic=False) if compiles else loss_now

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        run().backward()
        optimizer.step()

    return step


def _parallel(steps: list[Step]) -> Step:
    if not torch.cuda.is_available():
        return lambda: [step() for step in steps] and None
    streams: list[Any] = [torch.cuda.Stream() for _ in steps]

    def step() -> None:
        main = torch.cuda.current_stream()
        for stream, one in zip(streams, steps, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                one()
        for stream in streams:
            main.wait_stream(stream)

    return step


def _vmapped(name: str, batch: Batch, variants: int, precision: str, device: str, small: bool) -> Step:
    models = [_model(name, device, small) for _ in range(variants)]
    parameters, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    leaves = {key: value.detach().requires_grad_() for key, value in parameters.items()}
    x, y = batch
    optimizer = _adam(list(leaves.values()), device)

    def one(own: Any, state: Any) -> Any:
        return loss_of(name, torch.func.functional_call(base, (own, state), (x,)), y)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with _autocast(precision, device), sdpa_kernel(SDPBackend.MATH):
            losses = torch.vmap(one, in_dims=(0, 0), randomness="different")(leaves, buffers)
        losses.sum().backward()
        optimizer.step()

    return step
