"""Checkpoints of variants that train together. Lightning's dump -> *one file* -> any of them, or all of them again.

The file is an ordinary checkpoint of the leading variant, which plain Lightning loads; what is each variant's own
stands under `fusion`, with which the whole array goes on.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from torch import Tensor

from pl_pipe.errors import CheckpointError
from pl_pipe.strategies.fusion.replayed_optimizers import plain_state
from pl_pipe.strategies.fusion.settings import WITHOUT_FUSION
from pl_pipe.strategies.fusion.variant_building import Variant, settings_text
from pl_pipe.strategies.fusion.variant_hooks import overrides
from pl_pipe.strategies.fusion.variant_records import VariantRecords, has_diverged
from pl_pipe.strategies.fusion.variant_training import COUNTERS, VariantTraining

FUSION = "fusion"


def variant_checkpoint(dump: Mapping[str, Any], training: VariantTraining, place: int) -> dict[str, Any]:
    """What a run of this variant alone would save."""
    module, own = training.variants[place].module, {**dump, **training.counters_of(place)}
    if "optimizer_states" in dump and training.composite is not None:
        states = [optimizer.state_dict() for optimizer in training.composite.each[place]]
        own["optimizer_states"] = states if training.composite.replayed is None else list(map(plain_state, states))
        own["lr_schedulers"] = [config.scheduler.state_dict() for config in training.configs[place]]
        scaler = training.composite.scalers[place]
        if scaler is not None:
            own[type(module.trainer.precision_plugin).__qualname__] = scaler.state_dict()
    return _module_checkpoint(own, module)


def _module_checkpoint(dump: Mapping[str, Any], module: Any) -> dict[str, Any]:
    """With what the module itself has to add."""
    own = {name: value for name, value in dump.items() if name != FUSION}
    own["state_dict"] = _own_memory(module.state_dict())
    if module.hparams:
        own[module.CHECKPOINT_HYPER_PARAMS_KEY] = dict(module.hparams)
        if hasattr(module, "_hparams_name"):
            own[module.CHECKPOINT_HYPER_PARAMS_NAME] = module._hparams_name
    if overrides(module, "on_save_checkpoint"):
        type(module).on_save_checkpoint(module, own)
    return own


def array_checkpoint(
    dump: Mapping[str, Any], training: VariantTraining, finished: Sequence[Variant], records: VariantRecords
) -> dict[str, Any]:
    """All variants of the array, and the weights of those whose arrays were trained before."""
    numbers = [variant.number for variant in training.variants]
    each = [variant_checkpoint(dump, training, place) for place in range(len(numbers))]
    sound = [variant.number for variant in training.variants if not has_diverged(variant.module)]
    leading = records.leader(sound or numbers)
    whole = {**each[numbers.index(leading)], **{name: dump[name] for name in COUNTERS}}  # with which the array goes on
    whole[FUSION] = {
        "numbers": numbers,
        "leading": leading,
        "choices": [settings_text(variant.choice) for variant in training.variants],
        "variants": [_besides(dump, own) for own in each],
        "before": {
            variant.number: {
                **_besides(dump, _module_checkpoint(dump, variant.module)),
                "choice": settings_text(variant.choice),
            }
            for variant in finished
            if variant.number not in numbers
        },
        "stopped": records.stopped_steps(),
        "streams": training.members.streams.states,
        "left": training.members.streams.left,
        "active": [numbers[place] for place in training.active],
        "random": torch.get_rng_state(),
        "random_on_gpu": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
        "records": records.state_dict(),
    }
    return whole


def load_variants(checkpoint: Mapping[str, Any], training: VariantTraining, *, strict: bool, fitting: bool) -> None:
    """Puts weights into all variants."""
    modules = training.modules
    fusion = checkpoint.get(FUSION)
    if fusion is None:
        if len(modules) > 1 and not fitting:
            raise CheckpointError(
                f"the checkpoint is of one model, and there are {len(modules)} variants to evaluate; give a checkpoint "
                f"of fused variants, or evaluate this one by {WITHOUT_FUSION}"
            )
        if len(modules) > 1:
            raise CheckpointError(
                f"the checkpoint is of one model, and {len(modules)} variants are to go on from it: their optimizers "
                "would all have its learning rate; give a checkpoint of fused variants, or load weights in a factory"
            )
        _load(modules[0], checkpoint, strict=strict)
        return
    for place, own in enumerate(_own_of_each(fusion, training.variants, fitting=fitting)):
        _load(modules[place], {**checkpoint, **own}, strict=strict)
        has_left = fitting and training.variants[place].number not in fusion["active"]
        if has_left and any(name in own for name in COUNTERS):
            training.left_at[place] = {name: own.get(name, checkpoint[name]) for name in COUNTERS}


def go_on_from(checkpoint: Mapping[str, Any], training: VariantTraining, records: VariantRecords) -> list[int]:
    """After hooks before the training, which a run without an interruption does not have: records and random numbers
    are the checkpoint's. -> The numbers of variants that had left."""
    fusion = checkpoint.get(FUSION)
    if fusion is None:
        return []
    numbers = [variant.number for variant in training.variants]
    records.load_state_dict(fusion["records"])
    active = fusion["active"]
    states = dict(zip(active, fusion["streams"], strict=True))
    now = training.members.streams.states
    training.members.streams.states = [states.get(number, now[place]) for place, number in enumerate(numbers)]
    training.members.streams.left = fusion["left"]
    torch.set_rng_state(fusion["random"])
    on_gpu = fusion.get("random_on_gpu")
    if on_gpu is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state(on_gpu)
    return [number for number in numbers if number not in active]


def _own_of_each(fusion: Mapping[str, Any], variants: Sequence[Variant], *, fitting: bool) -> list[Mapping[str, Any]]:
    """What the checkpoint has of each variant's own. An evaluation may have other arrays than the training had."""
    choices = {variant.number: settings_text(variant.choice) for variant in variants}
    known = dict(zip(fusion["numbers"], fusion["choices"], strict=True))
    owns = dict(zip(fusion["numbers"], fusion["variants"], strict=True))
    if not fitting:
        owns.update(fusion["before"])
        known.update({number: own["choice"] for number, own in fusion["before"].items()})
    if any(known.get(number, choice) != choice for number, choice in choices.items()) or (
        fitting and list(known) != list(choices)
    ):
        raise CheckpointError(
            f"the checkpoint has variants {_list(list(known.values()))}, this run has {_list(list(choices.values()))}; "
            "give the same variants in the same order"
        )
    absent = next((number for number in choices if number not in owns), None)
    if absent is not None:
        raise CheckpointError(
            f"the checkpoint was made before variant {absent} ({choices[absent]}) was trained; give a later one"
        )
    return [owns[number] for number in choices]


def load_optimizers(checkpoint: Mapping[str, Any], training: VariantTraining, device: torch.device) -> None:
    """States of every variant's optimizer and schedulers."""
    assert training.composite is not None
    fusion = checkpoint.get(FUSION)
    each = [checkpoint] if fusion is None else fusion["variants"]
    for place, own in enumerate(each):
        states = own["optimizer_states"]  # none, where a checkpoint was written without
        for optimizer, state in zip(training.composite.each[place], states, strict=bool(states)):
            optimizer.load_state_dict(state)
            _optimizer_to_device(optimizer, device)
        if training.loops is not None:
            training.loops.load(place, {**checkpoint, **own})
        for config, state in zip(training.configs[place], own["lr_schedulers"], strict=False):
            config.scheduler.load_state_dict(state)
        scaler = training.composite.scalers[place]
        kept = own.get(type(training.speaker.trainer.precision_plugin).__qualname__)
        if scaler is not None and kept:
            scaler.load_state_dict(kept)
    assert isinstance(checkpoint, dict)
    checkpoint["lr_schedulers"] = []  # Lightning would take them for those of one model


def _load(module: Any, own: Mapping[str, Any], *, strict: bool) -> None:
    if overrides(module, "on_load_checkpoint"):
        type(module).on_load_checkpoint(module, own)
    module.load_state_dict(own["state_dict"], strict=strict)


def _own_memory(state: Mapping[str, Any]) -> dict[str, Any]:
    """A file of views would hold the whole array for each variant."""
    return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def _besides(dump: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """What all have in common is in the file once."""
    return {name: value for name, value in own.items() if dump.get(name) is not value}


def _list(choices: Sequence[str]) -> str:
    shown = "; ".join(choices[:4])
    return f"({shown}{'; …' if len(choices) > 4 else ''})"
