"""What fused training is measured against: training steps of plain models, made as quick as torch makes them.

serial eager       one model, operation by operation
serial compiled    one model, torch.compile, the whole step as a CUDA graph
vmap               all models as one, by torch.func
branches           all models, torch.compile, parallel streams of one CUDA graph
mps                one process a model, each as serial compiled; the driver starts them (gpu.py)
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from workloads import TENSOR_CORES, WORKLOADS, batch_of, build, loss_of

Step = Callable[[], None]


def peer(name: str, mode: str, variants: int, precision: str, device: str, *, small: bool = False) -> tuple[Step, int]:
    """A step, and how many models it trains."""
    if mode == "serial eager":
        return _step(name, precision, device, small, compiles=False), 1
    if mode == "serial compiled":
        return captured(_step(name, precision, device, small, compiles=True)), 1
    if mode == "vmap":
        return captured(_vmapped(name, variants, precision, device, small)), variants
    if mode == "branches":
        steps = [_step(name, precision, device, small, compiles=True) for _ in range(variants)]
        return captured(_parallel(steps)), variants
    raise ValueError(f"{mode} is no peer")


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


def _step(name: str, precision: str, device: str, small: bool, *, compiles: bool) -> Step:
    model = _model(name, device, small)
    x, y = batch_of(name, device, small=small)
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


def _vmapped(name: str, variants: int, precision: str, device: str, small: bool) -> Step:
    models = [_model(name, device, small) for _ in range(variants)]
    parameters, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    leaves = {key: value.detach().requires_grad_() for key, value in parameters.items()}
    x, y = batch_of(name, device, small=small)
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
