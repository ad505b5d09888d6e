"""`strategy="fusion"`: variants of one LightningModule trained as one. Lightning's hooks -> *strategy* -> training.

Lightning's loop runs once for all variants. It knows the first one's module; hooks, logs, optimizers, schedulers and
checkpoints of the others go through that one.

    trainer's loop ─► training_step    every variant's loss and gradients, by the quickest formulation
                   ─► optimizer_step   every variant's clipping, scaling and own optimizer
                   ─► validation_step, test_step, predict_step   every variant's own
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from pl_pipe.errors import ConfigError
from pl_pipe.log import get_logger
from pl_pipe.report.leaderboard import Leaderboard
from pl_pipe.strategies.checkpoint_io import AtomicCheckpointIO
from pl_pipe.strategies.fusion.composite_optimizer import CompositeOptimizer
from pl_pipe.strategies.fusion.launcher import FusionLauncher
from pl_pipe.strategies.fusion.settings import FusionSettings, names_of
from pl_pipe.strategies.fusion.step_formulation import TRAINING
from pl_pipe.strategies.fusion.support import check_model, check_trainer
from pl_pipe.strategies.fusion.variant_building import Factory, Variant, build_variants
from pl_pipe.strategies.fusion.variant_checkpoints import array_checkpoint, load_optimizers, load_variants
from pl_pipe.strategies.fusion.variant_choices import Choice, variant_choices
from pl_pipe.strategies.fusion.variant_hooks import overrides
from pl_pipe.strategies.fusion.variant_names import mean_loss, named_metrics
from pl_pipe.strategies.fusion.variant_records import VariantRecords
from pl_pipe.strategies.fusion.variant_results import VariantResults
from pl_pipe.strategies.fusion.variant_training import FusionFacts, VariantTraining

log = get_logger(__name__)

_BETWEEN = (
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"),
    *("configure_gradient_clipping", "optimizer_zero_grad"),
)
"""Hooks between a step's backward and its update."""


class FusedVariants(Strategy):
    """What fusion adds to a strategy, on one device or several."""

    has_whole_gradients = False
    """Those of all variants are one array, and no model's."""
    _averages_gradients = False

    def _set_up_fusion(
        self,
        variants: Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Any]] | None,
        *,
        factory: Factory | str | None,
        combine: str,
        trials: str | Path | None,
        seeds: Sequence[int] | None,
        settings: FusionSettings,
        folder: str | Path | None,
    ) -> None:
        self.settings = settings
        self.choices: list[Choice] = variant_choices(variants, combine=combine, trials=trials)
        """What each variant was given, by number."""
        self._factory = factory
        self._seeds = seeds
        self._folder = folder
        self._all: list[Variant] = []
        self._given: L.LightningModule | None = None
        self._records = VariantRecords(self.choices, monitor=settings.monitor, mode=settings.mode)
        self.training: VariantTraining | None = None
        """The variants that are being trained together, while a trainer runs."""
        self.fusion_facts: FusionFacts | None = None
        """How the last array's steps were computed."""
        self._stack = ExitStack()
        self._is_unseen: bool | None = None

    # ---- what users ask for

    @property
    def variants(self) -> list[L.LightningModule]:
        """The variants' modules, trained after a fit; empty before."""
        return [variant.module for variant in self._all]

    @property
    def leaderboard(self) -> Leaderboard:
        """Hyper-parameters, steps, best and last metrics of all variants, the best first."""
        return self._records.leaderboard()

    @property
    def records(self) -> VariantRecords:
        return self._records

    def stop_variants(self, numbers: Sequence[int], why: str = "stopped") -> None:
        """These variants, by number, are trained no further; the others go on. Without any left, training stops."""
        training = self.training
        if training is None:
            raise ConfigError("variants can be stopped while they are trained; no training is running")
        active = [training.variants[place] for place in training.active]
        leaving = [variant.number for variant in active if variant.number in numbers]
        if not leaving:
            return
        trainer = training.speaker.trainer
        for number in leaving:
            self._records.stopped(number, trainer.global_step, why)
            log.info("variant %d leaves after step %d: %s", number, trainer.global_step, why)
        if len(leaving) == len(active):
            trainer.should_stop = True
            return
        with torch.inference_mode(False), torch.enable_grad():  # a callback may ask for it after validation
            training.keep([place for place in training.active if training.variants[place].number not in leaving])
        self.lr_scheduler_configs = training.active_configs()

    # ---- setup and teardown

    def prepare(self, module: L.LightningModule) -> list[list[Variant]]:
        """All variants of a module, in arrays to be trained one after another."""
        from pl_pipe.strategies.fusion.array_width import arrays_of  # after the options are known to be right

        if self._given is not module or not self._all:
            self._all = build_variants(module, self.choices, factory=self._factory, seeds=self._seeds)
            self._given = module
            self._records.clear()
        return arrays_of(self._all, max_array=self.settings.max_array, device=self.root_device)

    def begin(self, variants: Sequence[Variant], trainer: L.Trainer) -> None:
        """These are trained or evaluated by the run that follows."""
        for variant in variants:
            variant.module.trainer = trainer
        self.training = VariantTraining(variants, self.settings)
        self._is_unseen = None

    def end(self) -> None:
        """The run is over: all modules are ordinary ones again."""
        self._stack.close()
        training, self.training = self.training, None
        if training is not None:
            self.fusion_facts = training.report()
            training.close()
        self._lightning_module = self._given
        self.model = self._given

    @override
    def connect(self, model: L.LightningModule) -> None:
        assert self.training is not None, "the launcher begins every run"
        super().connect(self.training.speaker)

    @override
    def _configure_launcher(self) -> None:
        self._launcher = FusionLauncher(self)

    @override
    def setup(self, trainer: L.Trainer) -> None:
        training = self.training
        assert training is not None
        assert self.accelerator is not None
        fitting = trainer.state.fn is TrainerFn.FITTING
        self._checkpoint_io = self._checkpoint_io or AtomicCheckpointIO()
        self.accelerator.setup(trainer)
        if fitting:
            check_model(training.speaker)
        check_trainer(trainer)
        for variant in training.variants:
            self.precision_plugin.convert_module(variant.module)
            variant.module.to(self.root_device)
        training.prepare(self.root_device)
        self.model = training.speaker
        self._stack = ExitStack()
        modes = {} if self.settings.monitor is None or self.settings.mode is None else {
            self.settings.monitor: self.settings.mode
        }  # fmt: skip
        self._stack.enter_context(named_metrics(trainer, modes))
        _callbacks_log_for_themselves(trainer, training.speaker)
        if fitting:
            self._stack.enter_context(self._records.listening(trainer))
            results = VariantResults(self, self._folder)
            self._stack.enter_context(results.listening(trainer))
            self.setup_optimizers(trainer)
            _optimizers_to_device(self.optimizers, self.root_device)

    @override
    def setup_optimizers(self, trainer: L.Trainer) -> None:
        assert self.training is not None
        composite, self.lr_scheduler_configs = self.training.set_up_optimizers(self._scaler)
        self.optimizers = [composite]

    @property
    def _scaler(self) -> Any:
        plugin = self.precision_plugin
        return plugin.scaler if isinstance(plugin, MixedPrecision) else None

    @override
    def teardown(self) -> None:
        if self.training is not None:
            for module in self.training.modules:
                module.cpu()
            if self.training.composite is not None:
                _optimizers_to_device(self.training.composite.own, torch.device("cpu"))
        super().teardown()
        trainer = None if self.training is None else self.training.speaker._trainer
        if trainer is not None and trainer.state.status is TrainerStatus.INTERRUPTED:
            self.end()  # nobody else will

    # ---- training

    @property
    def composite(self) -> CompositeOptimizer:
        assert self.training is not None
        assert self.training.composite is not None
        return self.training.composite

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        training = self.training
        assert training is not None
        trainer = training.speaker.trainer
        every = trainer.accumulate_grad_batches
        is_first = trainer.fit_loop.epoch_loop.batch_idx % every == 0
        updates = every == 1 and self._nothing_is_between(trainer)
        if is_first and not (updates and training.leaves_gradients):
            self._zero_gradients(trainer)
        outs = training.run(
            TRAINING,
            args,
            kwargs,
            context=self.precision_plugin.train_step_context,
            share=1.0 / every,
            adds=every > 1,
            updates=updates,
            clear_gradients=self.composite.zero_grad if is_first else None,
        )
        return self._one_output(outs)

    def _nothing_is_between(self, trainer: Any) -> bool:
        """Whether nobody looks at gradients before the optimizers do."""
        if self._is_unseen is None:
            module = self.training.speaker  # type: ignore[union-attr]
            self._is_unseen = (
                not trainer.gradient_clip_val
                and not self._averages_gradients
                and not any(overrides(module, hook) for hook in _BETWEEN)
                and not any(
                    getattr(type(callback), hook, None) is not getattr(L.Callback, hook)
                    for callback in trainer.callbacks
                    for hook in _BETWEEN
                    if hasattr(L.Callback, hook)
                )
            )
        return self._is_unseen

    def _zero_gradients(self, trainer: L.Trainer) -> None:
        """As each variant's module does it; Lightning's own call comes after the backward here, and is too late."""
        training = self.training
        assert training is not None
        for place in training.active:
            module = training.variants[place].module
            optimizer = self.composite.own[place]
            type(module).optimizer_zero_grad(
                module, trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx, optimizer
            )

    def _one_output(self, outs: Sequence[Any]) -> Any:
        """For Lightning and its callbacks: one number that tells of all."""
        training = self.training
        assert training is not None
        losses = [out.get("loss") if isinstance(out, Mapping) else out for out in outs]
        for place, loss, out in zip(training.active, losses, outs, strict=True):
            training.hooks.losses[place] = loss
            if isinstance(out, Tensor):
                training.hooks.outputs[place] = {"loss": loss}
        return mean_loss(losses)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Gradients are there already; what remains is to say so."""
        assert self.training is not None
        trainer = self.training.speaker.trainer
        for hook in ("on_before_backward", "on_after_backward"):
            given = (closure_loss,) if hook == "on_before_backward" else ()
            call._call_callback_hooks(trainer, hook, *given)
            call._call_lightning_module_hook(trainer, hook, *given)
        return closure_loss

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        speaker = self.lightning_module
        assert speaker is not None
        result = closure()
        self._average_gradients()
        self.composite.unscale()
        self.precision_plugin._after_closure(speaker, optimizer)
        self.composite.step()
        return result

    def _average_gradients(self) -> None:
        """Over devices; there is one."""

    # ---- evaluation

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated("validation_step", args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated("test_step", args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Each variant's predictions, by its name."""
        return self._evaluated("predict_step", args, kwargs)

    def _evaluated(self, hook: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        training = self.training
        assert training is not None
        contexts = {
            "validation_step": self.precision_plugin.val_step_context,
            "test_step": self.precision_plugin.test_step_context,
            "predict_step": self.precision_plugin.predict_step_context,
        }
        outs = training.run(hook, args, kwargs, context=contexts[hook])
        numbers = [training.variants[place].number for place in training.active]
        return {f"variant_{number}": out for number, out in zip(numbers, outs, strict=True)}

    # ---- checkpoints

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # put in by save_checkpoint, for each variant

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {}

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        assert self.training is not None
        whole = array_checkpoint(checkpoint, self.training, self._all, self._records)
        super().save_checkpoint(whole, filepath, storage_options)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.training is not None
        fitting = self.training.speaker.trainer.state.fn is TrainerFn.FITTING
        stopped = load_variants(checkpoint, self.training, self._records, strict=strict, fitting=fitting)
        if stopped:
            self.training.keep([p for p in self.training.active if self.training.variants[p].number not in stopped])
            self.lr_scheduler_configs = self.training.active_configs()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.training is not None
        load_optimizers(checkpoint, self.training, self.root_device)


class FusionStrategy(FusedVariants, SingleDeviceStrategy):
    """Trains variants of a LightningModule as one array on one device."""

    strategy_name = "fusion"

    def __init__(
        self,
        variants: Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Any]] | None = None,
        *,
        factory: Factory | str | None = None,
        combine: str = "grid",
        trials: str | Path | None = None,
        max_array: int | str = "auto",
        fuse_except: Sequence[str] = (),
        formulation: str = "auto",
        seeds: Sequence[int] | None = None,
        monitor: str | None = None,
        mode: str | None = None,
        compile: bool | str = "auto",  # noqa: A002
        folder: str | Path | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            variants: what each variant is to have of its own, such as `[{"lr": 0.1}, {"lr": 0.03, "dropout": 0.2}]`,
                or lists of values by name, to be combined. `seed` and `batch_size` are known besides the model's own.
            factory: builds a variant, `factory(**variant)`; without it the model's class is called with its saved
                hyper-parameters and those of the variant.
            combine: of lists of values: `grid` for all combinations, `zip` for the first of each, the second of each, …
            trials: a CSV or JSON file of variants.
            max_array: the most variants to train at once; `auto` for as many as memory holds.
            fuse_except: modules (also patterns: `layer1.*`) that run once a variant.
            formulation: `array`, `model array`, `one by one`, and for a GPU `branches`, `captured array`, `compiled
                branches`, `compiled array`; `auto` times them during the first steps.
            seeds: one for each variant; by default all have the run's.
            monitor: the metric of the leaderboard; by default `val_loss`, or else what is logged.
            mode: `min` or `max`; by default by the metric's name.
            compile: whether `auto` tries compiled steps on a GPU; `auto` where the training is long enough to repay it.
            folder: where variants.csv, curves and each variant's checkpoint are put; by default the logger's folder.
            options: what Lightning gives to SingleDeviceStrategy (accelerator, checkpoint_io, precision_plugin).
        """
        super().__init__(**options)
        self.parallel_devices: list[torch.device] = []
        """Filled in by Lightning."""
        settings = FusionSettings(max_array, names_of(fuse_except), formulation, monitor, mode, compile)
        self._set_up_fusion(
            variants,
            factory=factory,
            combine=combine,
            trials=trials,
            seeds=seeds,
            settings=settings,
            folder=folder,
        )

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


def _callbacks_log_for_themselves(trainer: L.Trainer, speaker: L.LightningModule) -> None:
    """What callbacks log is no variant's; Lightning lends them the first module's `log`."""
    plain = partial(type(speaker).log, speaker)

    def log_dict(dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in dictionary.items():
            plain(name, value, *args, **kwargs)

    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        callback.log, callback.log_dict = plain, log_dict
