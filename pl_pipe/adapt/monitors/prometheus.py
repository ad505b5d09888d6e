"""The monitors' latest numbers for Prometheus. monitors -> *PrometheusEndpoint* -> http://127.0.0.1:PORT/metrics."""

import re
from typing import Any

import lightning as L
from typing_extensions import override

from pl_pipe.adapt.monitors.base import Monitor
from pl_pipe.errors import ConfigError
from pl_pipe.log import get_logger

log = get_logger(__name__)


class PrometheusEndpoint(L.Callback):
    """Serves what other monitors have measured, on the loopback interface of rank 0's machine."""

    def __init__(self, *, port: int = 9400, address: str = "127.0.0.1") -> None:
        """
        Args:
            port: 0 takes any that is free.
        """
        try:
            import prometheus_client
        except ImportError as error:
            raise ConfigError(
                "PrometheusEndpoint needs prometheus_client, which is not installed; pip install 'pl-pipe[metrics]'"
            ) from error
        if not 0 <= port <= 65535:
            raise ConfigError(f"PrometheusEndpoint: port={port} is none; choose one from 1 to 65535, or 0 for any")
        self._client = prometheus_client
        self.port, self.address = port, address
        self._server: Any = None

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        self._registry = self._client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        try:
            self._server, self._thread = self._client.start_http_server(self.port, self.address, self._registry)
        except OSError as error:
            raise ConfigError(
                f"PrometheusEndpoint cannot listen at {self.address}:{self.port} ({error}); choose an address of this "
                "machine and another port, or 0 for any"
            ) from error
        self.port = self._server.server_port
        log.info("metrics: http://%s:%d/metrics", self.address, self.port)

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._server is None:
            return
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        values = {"global_step": float(trainer.global_step)}
        for monitor in callbacks:
            if isinstance(monitor, Monitor):
                values.update(monitor.values)
        for name, value in values.items():
            if name not in self._gauges:
                allowed = re.sub("[^a-zA-Z0-9_]", "_", f"pl_pipe_{name}")
                self._gauges[name] = self._client.Gauge(allowed, name, registry=self._registry)
            self._gauges[name].set(value)

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._close()

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(5.0)
            self._server = None
