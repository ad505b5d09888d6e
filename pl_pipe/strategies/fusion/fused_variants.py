"""What fusion adds to a strategy, on one device or several. Lightning's hooks -> *fused variants* -> training.

Lightning's loop runs once for all variants. It knows the first one's module; hooks, logs, optimizers, schedulers and
checkpoints of the others go through that one. Steps are in fused_steps.py.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import rank_zero_only
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.parsing import clean_namespace
from torch.optim import Optimizer
from typing_extensions import override

from pl_pipe.errors import ConfigError, refuse_other_lightning
from pl_pipe.log import get_logger
from pl_pipe.report.leaderboard import Leaderboard
from pl_pipe.strategies.checkpoint_io import AtomicCheckpointIO
from pl_pipe.strategies.fusion.divided_variants import DividedVariants
from pl_pipe.strategies.fusion.launcher import FusionLauncher
from pl_pipe.strategies.fusion.learning_rates import rates_of_variants
from pl_pipe.strategies.fusion.sanity_check import unmoved_by_sanity_check
from pl_pipe.strategies.fusion.settings import WITHOUT_FUSION, FusionSettings, checked_options, names_of, seeds_of
from pl_pipe.strategies.fusion.support import check_model, check_trainer, check_turns
from pl_pipe.strategies.fusion.trainer_callbacks import callbacks_log_for_themselves, is_users, told_modes
from pl_pipe.strategies.fusion.trainer_metrics import named_metrics
from pl_pipe.strategies.fusion.tuning import tuned_convolutions
from pl_pipe.strategies.fusion.variant_building import Factory, Variant, build_variants
from pl_pipe.strategies.fusion.variant_checkpoints import array_checkpoint, go_on_from, load_optimizers, load_variants
from pl_pipe.strategies.fusion.variant_choices import Choice, variant_choices, with_seeds
from pl_pipe.strategies.fusion.variant_loops import VariantLoops, why_in_turns, why_of_optimizer
from pl_pipe.strategies.fusion.variant_records import VariantRecords, has_diverged
from pl_pipe.strategies.fusion.variant_results import VariantResults
from pl_pipe.strategies.fusion.variant_training import FusionFacts, VariantTraining

log = get_logger(__name__)


class FusedVariants(DividedVariants):
    """To be put before one of Lightning's strategies, which says where things are and who else computes."""

    has_whole_gradients = False
    """Those of all variants are one array, and no model's."""
    _options_beneath: tuple[str, ...]
    """What the strategy beneath takes besides."""

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
        layers: str = "auto",
        folder: str | Path | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
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
            seeds: one for each variant; by default all have the run's. Without variants, the model as it is for each
                seed.
            monitor: the metric of the leaderboard; by default `val_loss`, or else what is logged.
            mode: `min` or `max`; by default by the metric's name.
            compile: whether `auto` tries compiled steps on a GPU; `auto` where the training is long enough to repay it,
                `tuned` with kernels that are tuned, which takes longer.
            layers: of an array: `timed` for the quickest formulation of each, measured once a shape and device, `usual`
                for what mostly is; `auto` times them on a GPU, but for steps that are compiled.
            folder: where variants.csv, curves and each variant's checkpoint are put; by default the logger's folder.
            accelerator, checkpoint_io, precision_plugin: as in Lightning's strategies, which may take more options.
        """
        more = checked_options(options, strategy=type(self), own=FusedVariants.__init__, known=self._options_beneath)
        lightnings: dict[str, Any] = {"accelerator": accelerator, "checkpoint_io": checkpoint_io}
        lightnings["precision_plugin"] = precision_plugin
        super().__init__(**lightnings, **more)  # not `**options`: jsonargparse would take all of DDP's for ours
        self.settings = FusionSettings(max_array, names_of(fuse_except), formulation, monitor, mode, compile, layers)
        self._settings_of_each = variant_choices(variants, combine=combine, trials=trials)
        is_one_as_given = not variants and trials is None
        self._seeds = seeds_of(seeds, None if is_one_as_given else len(self._settings_of_each))
        if is_one_as_given and self._seeds is not None:
            self._settings_of_each = [{} for _ in self._seeds]
        self.choices: list[Choice] = with_seeds(self._settings_of_each, self._seeds)
        """What each variant was given, by number."""
        self._are_given = not is_one_as_given or seeds is not None
        self._factory = factory
        self._folder = folder
        self._all: list[Variant] = []
        self._arrays: list[list[Variant]] = []
        self._finished: list[Variant] = []
        self.arrays_before = 0
        """Of the same call of the trainer; callbacks meet every array as if it were the only one."""
        self._given: L.LightningModule | None = None
        self._records = VariantRecords(self.choices, monitor=monitor, mode=mode)
        self._ended: VariantTraining | None = None
        """The last one, of which checkpoints can still be made."""
        self.fusion_facts: FusionFacts | None = None
        """How the last array's steps were computed."""
        self.weights_only: bool | None = None
        """What the trainer was told of checkpoints: False where they may hold any objects."""
        self._stack = ExitStack()

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
        """These variants, by number, are trained no further; the others go on. Without any left, training stops.

        Where several ranks train them, all of them call this at the same point, and rank 0's numbers count.
        """
        training = self.training
        if training is None:
            raise ConfigError("variants can be stopped while they are trained; no training is running")
        active = [training.variants[place] for place in training.active]
        leaving = [variant.number for variant in active if variant.number in numbers]
        if not leaving:
            return
        trainer = training.speaker.trainer
        self._records.diverged([number for number in leaving if has_diverged(self.variants[number])])
        for number in leaving:
            self._records.stopped(number, trainer.global_step, why)
            log.info("variant %d leaves after step %d: %s", number, trainer.global_step, why)
        if len(leaving) == len(active):
            trainer.should_stop = True
            return
        with torch.inference_mode(False), torch.enable_grad():  # a callback may ask for it after validation
            said = training.leave([place for place in training.active if training.variants[place].number in leaving])
        self._records.note(said, trainer.global_step, are_last=True)
        self.lr_scheduler_configs = training.active_configs()

    # ---- setup and teardown

    def prepare(self, module: L.LightningModule, *, fitting: bool, loads: bool) -> list[list[Variant]]:
        """All variants of a module, in arrays to be trained or evaluated one after another; of a variant, itself.

        Those of another module than before are built anew, unless trained ones would be evaluated as fresh ones.
        `loads`: they get their weights from a checkpoint.
        """
        from pl_pipe.strategies.fusion.array_width import arrays_of  # after the options are known to be right

        own = next((variant for variant in self._all if variant.module is module), None)
        if own is not None and not fitting:
            return [[own]]
        if own is not None:
            self._lightning_module = self._given
            raise ConfigError(
                f"the module is variant {own.number} of those that this strategy trains; train it alone by "
                f"{WITHOUT_FUSION}"
            )
        if self._given is not module or not self._all:
            if self._is_trained and not fitting and not loads:
                self._lightning_module = self._given
                raise ConfigError(
                    "variants of another model have been trained; those of this one would be built anew, with fresh "
                    "weights; give the model that was trained or one of trainer.strategy.variants, a ckpt_path, or "
                    f"evaluate it by {WITHOUT_FUSION}"
                )
            self._all = build_variants(module, self._settings_of_each, factory=self._factory, seeds=self._seeds)
            for variant, choice in zip(self._all, self.choices, strict=True):
                variant.choice = choice
            self._given = module
            if fitting:
                self._records.clear()
            self._arrays = arrays_of(
                self._all, max_array=self.settings.max_array, device=self.root_device, room=self._room()
            )
        if fitting and not self._are_given and getattr(rank_zero_only, "rank", 0) == 0:
            log.warning(
                "no variants are given, so one model is trained alone; name them: "
                'FusionStrategy(variants=[{"lr": 0.1}, …]), or strategy.variants.lr=[0.1,0.03] on the command line'
            )
        if fitting or not self._is_trained:
            self._finished = []
        return [list(array) for array in self._arrays]

    def _room(self) -> int | None:
        """Bytes for an array before anything is begun; None for what is free."""
        return None

    @property
    def _is_trained(self) -> bool:
        return self._ended is not None and self._ended.composite is not None

    def begin(self, variants: Sequence[Variant], trainer: L.Trainer) -> None:
        """These are trained or evaluated by the run that follows."""
        assert self._given is not None
        check_trainer(trainer)  # before callbacks' own setup, and after it for those that the model brings
        for module in (self._given, *(variant.module for variant in variants)):
            module.trainer = trainer
        if trainer.state.fn is TrainerFn.FITTING:
            self._ended = None
            self._records.begin([variant.number for variant in variants])
        self.may_be_divided(variants, trainer)
        self.training = VariantTraining(variants, self.settings, self._largest)
        self._lightning_module = self.training.speaker
        self._is_unseen = None

    def end(self) -> None:
        """The run is over: all modules are ordinary ones again."""
        self._stack.close()
        training, self.training = self.training, None
        if training is not None:
            self.fusion_facts = training.report()
            training.close()
            if training.composite is not None or not self._is_trained:  # an evaluation leaves what was trained
                self._ended = training
                self._finished.extend(training.variants)
        self._lightning_module = self._given
        self.model = self._given

    @override
    def connect(self, model: L.LightningModule) -> None:
        super().connect(model if self.training is None else self.training.speaker)  # a run, or a call by the user

    @override
    def _configure_launcher(self) -> None:
        refuse_other_lightning(self.accelerator)
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
            clean_namespace(variant.module.hparams)  # as Lightning does with the first one's, which is to be saved
            self.precision_plugin.convert_module(variant.module)
            variant.module.to(self.root_device)
        why = why_in_turns(training.speaker) if fitting else None
        training.prepare(self.root_device, in_turns=why is not None)
        training.has_users_callbacks = any(is_users(callback) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        self.model = training.speaker
        self._stack = ExitStack()
        self._stack.enter_context(tuned_convolutions(self.root_device))
        self._records.modes = told_modes(trainer, self.settings)
        self._stack.enter_context(named_metrics(trainer, self._records.modes, training.whose_turn))
        assert self._given is not None
        self._stack.enter_context(callbacks_log_for_themselves(trainer, training.speaker, self._given))
        if fitting:
            self._stack.enter_context(self._records.listening(trainer))
            self._stack.enter_context(unmoved_by_sanity_check(trainer, training.members.streams))
            results = VariantResults(self, self._folder)
            self._stack.enter_context(results.listening(trainer))
            self._stack.enter_context(rates_of_variants(trainer, training))
            self.setup_optimizers(trainer)
            assert training.composite is not None
            why = why or why_of_optimizer(training.composite.own[0])
            if why is not None:
                self._train_in_turns(why, trainer)
            _optimizers_to_device(self.optimizers, self.root_device)

    @override
    def setup_optimizers(self, trainer: L.Trainer) -> None:
        assert self.training is not None
        composite, self.lr_scheduler_configs = self.training.set_up_optimizers(self._scaler)
        self.optimizers = [composite]

    def _train_in_turns(self, why: str, trainer: L.Trainer) -> None:
        """Each variant's steps are run by themselves, as Lightning runs them."""
        assert self.training is not None
        check_turns(why, self.training.speaker, formulation=self.settings.formulation, is_ddp=self._averages_gradients)
        if not self.arrays_before:
            rank_zero_info(f"Variants are trained one after another within each batch: {why}.")
        self._as_built = None  # what a step takes could not be taken back
        self.training.run_in_turns(VariantLoops(self, trainer))
        self._stack.enter_context(self.training.loops.running())  # type: ignore[union-attr]

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
                every = [one for own in self.training.composite.each for one in own]
                _optimizers_to_device(every, torch.device("cpu"))
        super().teardown()
        trainer = None if self.training is None else self.training.speaker._trainer
        if trainer is not None and trainer.state.status is TrainerStatus.INTERRUPTED:
            self.end()  # nobody else will

    # ---- checkpoints

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """As the trainer was told."""
        told = self.weights_only if weights_only is None else weights_only
        self._checkpoint_io = self._checkpoint_io or AtomicCheckpointIO()  # one may be looked at before the setup
        return super().load_checkpoint(checkpoint_path, weights_only=told)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # put in by save_checkpoint, for each variant

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {}

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        training = self.training or self._ended
        if training is None:
            raise ConfigError("variants can be saved while they are trained and after it; nothing has been trained")
        whole = array_checkpoint(checkpoint, training, self._finished, self._records)
        super().save_checkpoint(whole, filepath, storage_options)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self.training is None:
            raise ConfigError(
                "variants take their weights from a checkpoint when a run begins, and none is running; give ckpt_path "
                "to trainer.fit, validate, test or predict"
            )
        fitting = self.training.speaker.trainer.state.fn is TrainerFn.FITTING
        for variant in self.training.variants:
            self.precision_plugin.convert_module(variant.module)  # or weights of 64 bits would be read into 32
        load_variants(checkpoint, self.training, strict=strict, fitting=fitting)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.training is not None
        stopped = go_on_from(checkpoint, self.training, self._records)
        if stopped:
            self.training.keep([p for p in self.training.active if self.training.variants[p].number not in stopped])
            self.lr_scheduler_configs = self.training.active_configs()
        load_optimizers(checkpoint, self.training, self.root_device)
