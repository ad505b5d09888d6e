"""Picks formulations by running them. site, ways -> *Timed* -> the name of the quickest, and how long each took.

What was measured is kept in files, by device and shapes: the next run with such layers knows. A way is timed forward
and backward; on a GPU as a captured graph, which is how steps run there: launching its operations from Python would
take longer than they do.
"""

import hashlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pl_pipe.fusion.formulations import Site, Usual
from pl_pipe.log import get_logger
from pl_pipe.profiling.place import device_name
from pl_pipe.profiling.profile_cache import FOLDER_VARIABLE, default_folder
from pl_pipe.units import format_seconds

log = get_logger(__name__)

_RUNS = 3
_FOLDER = "layers"
Times = dict[str, float | None]
"""Seconds of each way; None for one that failed."""


class Timed(Usual):
    """The quickest; where none can be timed, the usual one."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` is that of measurements, by default within that of cached profiles."""
        self._folder = folder or default_folder() / _FOLDER
        self._known: dict[str, Times] = {}
        self._chosen: dict[str, tuple[str, str]] = {}
        """By site: the choice, and why."""
        self.is_usual = True
        """Whether everything so far is computed as it would be without measuring."""

    def choose(self, site: Site, ways: Mapping[str, Callable[[], Any]]) -> str:
        if str(site) not in self._chosen:
            times = self._times(site, ways)
            ranked = sorted((seconds, name) for name, seconds in times.items() if seconds is not None)
            name = ranked[0][1] if ranked else super().choose(site, ways)
            told = [f"{one} {format_seconds(seconds)}" for seconds, one in ranked]
            failed = [f"{one} fails" for one, seconds in times.items() if seconds is None]
            self._chosen[str(site)] = name, ", ".join(told + failed)
            self.is_usual = self.is_usual and name == super().choose(site, ways)
        return self._chosen[str(site)][0]

    def reason(self, site: Site) -> str:
        return self._chosen[str(site)][1]

    def _times(self, site: Site, ways: Mapping[str, Callable[[], Any]]) -> Times:
        facts = _facts(site)
        path = self._folder / f"{hashlib.sha256(facts.encode()).hexdigest()[:32]}.json"
        times = self._known[facts] if facts in self._known else _read(path)
        if times.keys() != ways.keys():
            device = torch.device(site.device)
            times = {name: _seconds(way, device) for name, way in ways.items()}
            if None not in times.values():  # for want of memory, say, which another run may have
                _write(path, {"site": json.loads(facts), "seconds": times})
        self._known[facts] = times
        return times


def _read(path: Path) -> Times:
    """Nothing where the file is damaged: it is a cache."""
    try:
        found = {str(name): float(seconds) for name, seconds in json.loads(path.read_text())["seconds"].items()}
        if not all(0 < seconds < math.inf for seconds in found.values()):
            raise ValueError(f"times are {list(found.values())}")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        log.warning("timings of a layer in %s cannot be used and are measured anew: %s", path, error)
        return {}
    return dict(found)


def _write(path: Path, content: Any) -> None:
    """Whole or not at all, also where several runs write the same."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as part:
            json.dump(content, part, indent=1)
        Path(part.name).replace(path)
    except OSError as error:
        log.warning(
            "timings of layers cannot be kept for the next run: %s; set %s to a folder that can be written",
            error,
            FOLDER_VARIABLE,
        )


def _facts(site: Site) -> str:
    """Whatever the time depends on: not the layer's name."""
    facts = {**asdict(site), "device": device_name(torch.device(site.device)), "torch": torch.__version__}
    del facts["layer"]
    return json.dumps(facts, sort_keys=True, default=str)


def _seconds(way: Callable[[], Any], device: torch.device) -> float | None:
    try:
        return _replayed(way) if device.type == "cuda" else _run(way)
    except (RuntimeError, NotImplementedError) as error:  # out of memory among them
        log.debug("a formulation of a layer cannot be timed: %s", error)
        return None


def _run(way: Callable[[], Any]) -> float:
    way()
    found = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        way()
        found.append(time.perf_counter() - began)
    return min(found)


def _replayed(way: Callable[[], Any]) -> float:
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        way()  # kernels are loaded and chosen
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        way()
    marks: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    graph.replay()
    marks[0].record()
    for _ in range(_RUNS):
        graph.replay()
    marks[1].record()
    torch.cuda.synchronize()
    return float(marks[0].elapsed_time(marks[1])) / 1e3 / _RUNS
