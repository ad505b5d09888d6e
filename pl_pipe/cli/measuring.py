"""The commands that measure: profile a recipe's layers, probe the links between ranks."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import Progress

from pl_pipe.cli.assemble import build_data, build_model, hardware_of, seed_all, use_network
from pl_pipe.cli.fusion_profile import profile_fusion
from pl_pipe.cli.hardware import resolve_hardware
from pl_pipe.cli.messages import say
from pl_pipe.cli.outputs import written_together
from pl_pipe.cli.run_directory import RunDirectory, job_choices
from pl_pipe.cluster import detect_launch
from pl_pipe.config import ProbeRoot
from pl_pipe.errors import ConfigError, DataError
from pl_pipe.graph import format_graph, write_profile
from pl_pipe.log import get_logger
from pl_pipe.profiling import profile, time_loading
from pl_pipe.profiling.link_report import cluster_of, write_cluster
from pl_pipe.profiling.probe_processes import probe_launched, probe_local
from pl_pipe.report.profile_chart import draw_profile
from pl_pipe.report.tables import profile_table
from pl_pipe.units import format_bytes, format_seconds

log = get_logger(__name__)

_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_PLAIN = (None, "32", "32-true")


def profile_recipe(cfg: DictConfig, run: RunDirectory) -> None:
    """Measures one training step, layer by layer; leaves `profile.json`, `graph.txt` and a bar chart."""
    if job_choices()["strategy"] == "fusion":
        profile_fusion(cfg, run)
        return
    hardware = hardware_of(cfg)
    seed_all(cfg.seed)
    if cfg.profiling.load_batches < 1 or cfg.profiling.repeats < 1 or cfg.profiling.warmup < 0:
        raise ConfigError(
            f"profiling.repeats={cfg.profiling.repeats} profiling.warmup={cfg.profiling.warmup} profiling.load_batches="
            f"{cfg.profiling.load_batches}; set repeats and load_batches to 1 or more, warmup to 0 or more"
        )
    precision = cfg.trainer.precision
    if precision not in (*_PLAIN, *_AUTOCAST):
        known = ", ".join(("32-true", *_AUTOCAST))
        raise ConfigError(f"trainer.precision={precision} cannot be profiled; choose one of {known}")
    data, model = build_data(cfg), build_model(cfg)
    if is_overridden("configure_model", model):
        model.configure_model()
    data.prepare_data()
    data.setup("fit")
    loader = data.train_dataloader()
    batch = next(iter(loader), None)
    if batch is None:
        raise DataError("the training data loader gave no batch; check data.batch_size and the data set's size")
    load_s = time_loading(loader, cfg.profiling.load_batches)
    with Progress(transient=True) as progress:
        task = progress.add_task("measuring layers")
        measured = profile(
            model,
            batch,
            device=hardware.accelerator,
            repeats=cfg.profiling.repeats,
            warmup=cfg.profiling.warmup,
            autocast_dtype=_AUTOCAST.get(precision),
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    found = replace(measured, data_load_s=load_s)
    names = {"profile": "profile.json", "graph": "graph.txt", "picture": "profile.png"}
    targets = {name: run.path / file for name, file in names.items()}
    with written_together(targets) as places:
        places["graph"].write_text(format_graph(found.graph) + "\n")
        draw_profile(found, places["picture"])
        write_profile(found, places["profile"])
    Console().print(profile_table(found))
    say(
        f"step {format_seconds(found.step_s)}; its layers add up to {100 * found.coverage:.0f} % of that; "
        f"fetching a batch takes {format_seconds(load_s)}"
    )
    if not 0.85 <= found.coverage <= 1.15:
        log.warning(
            "the layers do not explain the step well: the machine is busy, or the step too short to measure; "
            "try again, with profiling.repeats=%d or a larger batch", 2 * cfg.profiling.repeats,
        )  # fmt: skip
    if found.unused_parameters:
        log.warning("the step used no %s; no layer counts them", ", ".join(found.unused_parameters))
    for read in found.graph.reads:
        say(f"{read.line} reads the value of a tensor during the step, which limits where a pipeline can be cut")
    for name, path in targets.items():
        say(f"{name}: {path}")
    say(f"Next: pl-pipe plan profile={targets['profile']} cluster.devices=4")


def probe(cfg: DictConfig) -> None:
    """Measures the links between the ranks of a job; leaves `cluster.json`."""
    settings: Any = OmegaConf.to_object(cfg)
    assert isinstance(settings, ProbeRoot)
    launch = detect_launch(os.environ)
    use_network(cfg)
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    hardware = resolve_hardware(settings.trainer, launch, cuda_devices=cuda)
    if not settings.probe.timeout_s > 0 or not settings.probe.pair_budget_s > 0:
        raise ConfigError(
            f"probe.timeout_s={settings.probe.timeout_s} probe.pair_budget_s={settings.probe.pair_budget_s}; "
            f"both take more than 0 seconds"
        )
    out = Path(settings.probe.out).expanduser()
    with Progress(transient=True, disable=launch is not None and launch.rank != 0) as progress:
        task = progress.add_task("measuring links")

        def show(done: int, total: int, doing: str) -> None:
            progress.update(task, completed=done, total=total, description=f"measuring {doing}")

        shared: dict[str, Any] = {
            "device": hardware.accelerator,
            "pair_budget_s": settings.probe.pair_budget_s,
            "timeout_s": settings.probe.timeout_s,
        }
        if launch is not None:
            report = probe_launched(launch, progress=show, **shared)
        else:
            report = probe_local(hardware.devices, progress=show, **shared)
    if report is None:
        return  # rank 0 writes and speaks
    cluster = cluster_of(report)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_cluster(report, cluster, out)
    for number, level in enumerate(cluster.levels):
        say(
            f"level {number}: {level.members} members, {format_bytes(level.bandwidth)}/s, latency "
            f"{format_seconds(level.latency_s)}, all-reduce {level.all_reduce_factor:.2f} (an ideal ring is 2)"
        )
    say(f"cluster: {out}\nNext: pl-pipe plan profile=profile.json cluster=file cluster.path={out}")
