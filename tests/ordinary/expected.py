"""What becomes of each script under each strategy, where it is not the same as in the plain run."""

from typing import NamedTuple


class Case(NamedTuple):
    strategy: str
    """One of the runner's."""
    ranks: int
    title: str


WHOLE, PARTS, STRAIGHT, DEFAULT, FUSION, ADAPTIVE = (
    "whole batches", "1f1b", "pipedream", "default", "fusion", "adaptive"
)  # fmt: skip
CASES = (
    Case(WHOLE, 3, "`1f1b`, batches whole, 3 ranks"),
    Case(PARTS, 2, "`1f1b`, 2 ranks"),
    Case(STRAIGHT, 2, "`pipedream`, `plan=straight`, 2 ranks"),
    Case(DEFAULT, 2, "`pipedream` as it comes, 2 ranks"),
    Case(FUSION, 1, "`fusion`, 2 variants"),
    Case(ADAPTIVE, 2, "`adaptive`, 2 ranks"),
)
LATE = (STRAIGHT, DEFAULT)
"""Weights are of other batches than a single process's, so that nothing is compared."""
BY_A_CUT = r"StageError: .*(set schedule=1f1b|by plan=straight)"
"""What a script that reads values may be refused with where the plan, made from times, cuts it elsewhere than usual."""

DRAWS = "draws numbers of its own in a step"
"""A pipeline's steps draw from another stream than a single process."""
RANKS = "says how many ranks there are"
DATA = "its data are drawn from the process's numbers, which variants share"
GIVEN = "the model that was given is changed or used besides its variants"

RUNS: dict[str, dict[str, str]] = {
    **{
        name: {WHOLE: DRAWS}
        for name in ("barlow_twins", "ddpm", "dqn_iterable", "reinforce", "seq2seq_attention", "vae")
    },
    "barrier_global_zero": {WHOLE: RANKS},
    "trainer_attributes_hooks": {WHOLE: RANKS},
}
"""By script and strategy: why a run is not compared with the plain one."""
_OF_DATA = (
    "bert_glue_tutorial", "datamodule_batch_augmentation", "dqn_iterable", "gru_forecaster", "seq2seq_attention",
    "simclr", "torchgeo_task", "trainer_datamodule", "triplet",
)  # fmt: skip
for _name in _OF_DATA:
    RUNS.setdefault(_name, {})[FUSION] = DATA
RUNS["datamodule_batch_augmentation"][WHOLE] = DRAWS
RUNS["barlow_twins"][FUSION] = "a callback makes a layer from the process's numbers"
RUNS["bf16_mixed"] = {FUSION: "bfloat16 rounds another order of sums"}
RUNS["mixtral_tiny"] = {FUSION: "float32 rounds another order of sums, which decides between experts"}
RUNS["fit_twice"] = {FUSION: GIVEN}

_BY_HAND = "set schedule=1f1b"
_NEEDS_SYNCHRONOUS = {
    "dcgan_closure": _BY_HAND,
    "ema_callback": _BY_HAND,
    "gan_docs": _BY_HAND,
    "gradient_accumulation_scheduler": "set accumulate_grad_batches for the whole run|schedule=1f1b",
    "lightly_simsiam": "set it in on_train_batch_end, or set schedule=1f1b",
    "log_dict_on_step": "under trainer.is_global_zero, or set schedule=1f1b",
    "lr_find": _BY_HAND,
    "lr_finder_callback": _BY_HAND,
    "manual_accumulation": _BY_HAND,
    "normalizing_flow": "or set schedule=1f1b",
    "optimizer_needs_closure": _BY_HAND,
    "overridden_backward": _BY_HAND,
    "sam_manual": _BY_HAND,
    "swa": _BY_HAND,
    "wgan_gp": _BY_HAND,
}
_OF_ONE_MODEL = "changes one model, and fused variants are several"
_BATCH_SIZE = "not supported with distributed strategies"  # Lightning's words, as under DDP
REFUSED: dict[str, dict[str, str]] = {name: dict.fromkeys(LATE, words) for name, words in _NEEDS_SYNCHRONOUS.items()}
"""By script and strategy: what the error says, as a regular expression."""
for _name, _words in {
    "actor_critic": "is called outside of the steps and hooks",
    "batch_size_scaling": _BATCH_SIZE,
    "finetuning_callback": "freeze modules in the model itself",
    "lbfgs": "choose another optimizer",
    "training_step_none": r"return a loss of zero, such as loss \* 0",
}.items():
    REFUSED.setdefault(_name, {}).update(dict.fromkeys((WHOLE, *LATE), _words))
for _name in ("ema_callback", "finetuning_callback", "lr_find", "lr_finder_callback", "swa"):
    REFUSED.setdefault(_name, {})[FUSION] = _OF_ONE_MODEL
REFUSED["optimizer_needs_closure"][FUSION] = "override optimizer_step in the model"
_OF_STAGES = "give each stage one device, by plan=straight"
for _name, _words in {
    "barlow_twins": _OF_STAGES,
    "hook_prints_on_main": _OF_STAGES,
    "hook_reads_by_helper": f"{_OF_STAGES}|under trainer.is_global_zero, or set schedule=1f1b",
    "trainer_attributes_hooks": _OF_STAGES,
    "outputs_in_hooks": "under trainer.is_global_zero, or set schedule=1f1b",
}.items():
    REFUSED.setdefault(_name, {})[DEFAULT] = _words
for _name in ("moco_ema_in_step", "omegaconf_config"):
    REFUSED[_name] = dict.fromkeys(LATE, "or set schedule=1f1b")
REFUSED["dqn_iterable"] = dict.fromkeys(LATE, "or set schedule=1f1b|and plan=straight")
BY_PLAN = (
    "barlow_twins", "dqn_iterable", "hook_prints_on_main", "hook_reads_by_helper", "moco_ema_in_step",
    "normalizing_flow", "omegaconf_config", "outputs_in_hooks", "trainer_attributes_hooks",
)  # fmt: skip
"""Refused under some plans only, and which one is made depends on what layers took when they were timed."""

NOT_CLAIMED: dict[str, dict[str, str]] = {
    "actor_critic": {DEFAULT: "refused under some plans, and plays with a stage's weights under others", FUSION: GIVEN},
    "detection_lists": dict.fromkeys((WHOLE, *LATE), "shapes that follow from values inside a library's module"),
    "cli_in_process": {FUSION: "variants of a command line have a test of their own"},
    **{
        name: {ADAPTIVE: "fails under DDP as well"}
        for name in ("batch_size_scaling", "kfold", "lr_find", "training_step_none")
    },
}
"""By script and strategy: why nothing is said of it."""
IN_FLOAT32 = (
    "barlow_twins",
    "dqn_iterable",
    "example_input_summary",
    "gan_docs",
    "mixtral_tiny",
    "reinforce",
    "triplet",
)
"""As variants: what they make for themselves is float32."""
IN_PARTS = (
    "autoencoder_plain",
    "bart_summarization",
    "bert_sequence_classification",
    "callback_saves_in_hooks",
    "compiled_inner",
    "ema_module_copy",
    "fit_twice",
    "gpt2_lm",
    "gru_forecaster",
    "llama_as_it_comes",
    "lm_ignore_index",
    "lr_find",
    "lr_finder_callback",
    "outputs_in_hooks",
    "tagger_imported_losses",
    "transfer_learning_frozen_backbone",
    "transformer_encoder_lm",
)
"""Run by micro-batches too; with batch norm, pairs of samples or counts of steps those are other numbers."""
ROUNDED = {"bart_summarization": 1e-5, "forecasting_tft": 1e-4}
"""Tolerances: gradients of zero are rounding, which Adam makes as large as others."""
NEEDS = {
    "bart_summarization": "transformers",
    "bert_glue_tutorial": "transformers",
    "bert_sequence_classification": "transformers",
    "cli_in_process": "jsonargparse",
    "forecasting_tft": "pytorch_forecasting",
    "gpt2_lm": "transformers",
    "gradient_checkpointing_llm": "transformers",
    "lightly_simsiam": "lightly",
    "llama_as_it_comes": "transformers",
    "mixtral_tiny": "transformers",
    "peft_lora_gpt2": "peft",
    "pyg_gcn": "torch_geometric",
    "smp_segmentation": "segmentation_models_pytorch",
    "t5_generate_validation": "transformers",
    "timm_model": "timm",
    "torchgeo_task": "torchgeo",
    "vit_transformers": "transformers",
}
"""The library that a script needs besides the project's own; `pip install -e .[ordinary]` brings all."""
