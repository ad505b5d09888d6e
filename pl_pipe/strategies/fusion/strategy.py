"""`strategy="fusion"`: variants of one LightningModule trained as one, on one device."""

from collections.abc import Sequence

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from typing_extensions import override

from pl_pipe.errors import ConfigError
from pl_pipe.strategies.fusion.fused_variants import FusedVariants


class FusionStrategy(FusedVariants, SingleDeviceStrategy):
    """Trains variants of a LightningModule as one array on one device. The arguments are those of FusedVariants."""

    strategy_name = "fusion"
    _options_beneath = ("device",)
    parallel_devices: Sequence[torch.device] = ()
    """Filled in by Lightning."""

    @property
    @override
    def root_device(self) -> torch.device:
        return self.parallel_devices[0] if self.parallel_devices else self._root_device

    @override
    def setup_environment(self) -> None:
        if len(self.parallel_devices) > 1:
            raise ConfigError(
                f"FusionStrategy trains on one device, the trainer has {len(self.parallel_devices)}; set devices=1, or "
                "use FusionDDPStrategy, which divides each batch among devices"
            )
        super().setup_environment()
