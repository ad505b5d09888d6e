"""The trainer's metrics, under the names that users know. Lightning's results -> *trainer metrics* -> whoever asks.

Lightning shows all in the progress bar; of many variants the best one's value is enough. By its plain name a metric can
be monitored as ever. To compare numbers is to wait for the GPU, so that is done only when somebody asks; and a progress
bar, which does so at every step, is given those that have arrived.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
from torch import Tensor
from typing_extensions import override

from pl_pipe.errors import FusionError
from pl_pipe.strategies.fusion.late_numbers import LateNumbers
from pl_pipe.strategies.fusion.variant_names import best_of_all, divided, named
from pl_pipe.strategies.fusion.variant_turns import Nobody
from pl_pipe.tensors.operations import user_line


@contextmanager
def named_metrics(
    trainer: L.Trainer, modes: Mapping[str, str], whose: Callable[[], int | Nobody | None] = lambda: None
) -> Iterator[None]:
    """Within the block the trainer's metrics have these names. A variant's own hook or step that asks by the plain name
    is told its own (`whose` turn it is); one that runs for all of them is not told."""
    connector: Any = trainer._logger_connector
    plain = type(connector)
    latest: dict[str, dict[str, Any]] = {}
    bar = _Bar(modes)

    written: dict[str, Any] = {}
    """By callbacks (LearningRateMonitor) and variants, into what they were shown."""

    def bests() -> dict[str, Any]:
        logged = {name: best_of_all(each, modes)[name] for name, each in latest.items()}
        numbers = {name: value for name, value in written.items() if divided(name)[1] is None or _is_number(value)}
        return {**best_of_all(numbers, modes), **logged}

    def write(values: Mapping[str, Any]) -> None:
        number = whose()
        own = values if not isinstance(number, int) else {f"{n}/variant_{number}": v for n, v in values.items()}
        written.update(named(own))

    class Named(plain):  # type: ignore[misc, valid-type]
        @property
        def metrics(self) -> Any:
            with _unread(self.trainer._results, is_step=self._first_loop_iter is not None) as asked:
                found = super().metrics
            now: dict[str, dict[str, Any]] = {}
            for name, value in found["callback"].items():
                metric, number = divided(name)
                if number is not None:
                    now.setdefault(metric, {})[name] = value
            latest.update(now)
            bar.asked.update(asked)
            if self._first_loop_iter is None:
                self._progress_bar_metrics.update(bar.read())
            return {"callback": named(found["callback"]), "log": named(found["log"]), "pbar": {}}

        @property
        def callback_metrics(self) -> Any:
            number = whose()
            if isinstance(number, Nobody):
                raise FusionError(
                    f"{user_line()}: the step reads trainer.callback_metrics, which are each variant's own, but runs "
                    "once for all of them"
                )
            found = super().callback_metrics
            if number is None:
                return _Shown({**written, **bests(), **found}, write)
            logged = (item for each in latest.values() for item in each.items())
            of_one = {
                divided(name)[0]: value for name, value in (*written.items(), *logged) if divided(name)[1] == number
            }
            return _Shown({**written, **of_one, **found}, write)

        @property
        def metrics_of_variants(self) -> Any:
            return super().callback_metrics

        @property
        def progress_bar_metrics(self) -> Any:
            found = super().progress_bar_metrics
            found.update(bar.arrived())
            return found

        def reset_metrics(self) -> None:
            super().reset_metrics()
            latest.clear()
            written.clear()

    connector.__class__ = Named
    try:
        yield
    finally:
        if trainer._results:  # interrupted; what it still has is known by other names
            _ = connector.callback_metrics, connector.logged_metrics
            trainer._results.reset()
        connector.__class__ = plain
        left = {**written, **bests()}
        connector._callback_metrics.update({n: v.cpu() if isinstance(v, Tensor) else v for n, v in left.items()})
        connector._progress_bar_metrics.update(bar.read())


def metrics_of_variants(trainer: Any) -> Mapping[str, Any]:
    """The callback metrics of a trainer that names them so, but for the best of all: nothing is waited for."""
    return trainer._logger_connector.metrics_of_variants  # type: ignore[no-any-return]


@contextmanager
def _unread(results: Any, *, is_step: bool) -> Iterator[dict[str, Any]]:
    """Within the block Lightning does not read what it shows, value by value, but yields it."""
    shown = [metric for _, metric in results.valid_items() if metric.meta.prog_bar]
    found = {results._forked_name(metric, is_step)[1]: results._get_cache(metric, is_step) for metric in shown}
    for metric in shown:
        metric.meta.prog_bar = False
    try:
        yield {name: value for name, value in found.items() if value is not None}
    finally:
        for metric in shown:
            metric.meta.prog_bar = True


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, float | int)


class _Shown(dict[str, Any]):
    """Metrics as they are just now. What is written into them stays, as in the dictionary that Lightning shows."""

    def __init__(self, found: Mapping[str, Any], write: Callable[[Mapping[str, Any]], None]) -> None:
        super().__init__(found)
        self._write = write

    @override
    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    @override
    def update(self, *args: Any, **kwargs: Any) -> None:
        given: dict[str, Any] = dict(*args, **kwargs)
        super().update(given)
        self._write(given)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # copies are nobody's


class _Bar:
    """What a progress bar shows: values that were asked for some steps ago, and have arrived since."""

    def __init__(self, modes: Mapping[str, str]) -> None:
        self._modes = modes
        self.asked: dict[str, Any] = {}
        """By Lightning's names, and not read yet."""
        self._coming: tuple[list[str], LateNumbers] | None = None

    def arrived(self) -> dict[str, Any]:
        """May be of an earlier step, or nothing."""
        if self._coming is not None and not self._coming[1].have_arrived:
            return {}
        found = self._settled()
        if self.asked:
            self._coming = list(self.asked), LateNumbers(list(self.asked.values()))
            self.asked = {}
            if self._coming[1].have_arrived:  # numbers of a CPU
                found = self._settled()
        return found

    def read(self) -> dict[str, Any]:
        """The latest of all."""
        found = self._settled()
        asked, self.asked = self.asked, {}
        numbers = LateNumbers(list(asked.values())).read()
        return {**found, **best_of_all(dict(zip(asked, numbers, strict=True)), self._modes)}

    def _settled(self) -> dict[str, Any]:
        if self._coming is None:
            return {}
        names, numbers = self._coming
        self._coming = None
        return best_of_all(dict(zip(names, numbers.read(), strict=True)), self._modes)
