"""Architectures of `transformers`, tiny and random, each in one plain LightningModule: how they train in each mode.

name, config, kind of batch ── Architecture ──► plain runs (fp32; fp64 for two seeds)
                                                a pipeline: whole batches, micro-batches (fp32)
                                                fusion of two variants (fp64)
"""

import os
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # also where this file is run alone

import lightning as L
import torch
from ordinary.runner import differences
from pipedream_tasks import Rank
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import modeling_utils  # noqa: F401 - once, before ranks are forked

TIMEOUT_S = 60.0
STEPS, SAMPLES, LENGTH, VOCAB, CLASSES = 3, 4, 12, 64, 3
SEEDS = (1, 2)
"""Of the variants; the first is the pipelines', too."""
WHOLE, PARTS, FUSION = "whole batches", "1f1b", "fusion"
RANKS = {WHOLE: 2, PARTS: 2, FUSION: 1}


class Architecture(NamedTuple):
    name: str
    kind: str
    """Of batch."""
    config: dict[str, Any]
    """Besides `COMMON`; of which None leaves one out."""


COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "output_router_logits": True}
SEQ2SEQ: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
IMAGE = {"image_size": 16, "patch_size": 4}
TOWER = {name: value for name, value in COMMON.items() if not name.endswith("token_id")}

CTC = {"ctc_loss_reduction": "mean", "ctc_zero_infinity": True}
SWIN: dict[str, Any] = {"window_size": 2, "num_hidden_layers": None, "num_attention_heads": None}

ALL = (
    Architecture("llama", "causal", {"num_key_value_heads": 1}),
    Architecture("gpt2", "causal", {}),
    Architecture("gpt_neo", "causal", {"attention_types": [[["global", "local"], 1]], "window_size": 8}),
    Architecture("gpt_neox", "causal", {}),
    Architecture("gptj", "causal", {"rotary_dim": 4}),
    Architecture("opt", "causal", {"ffn_dim": 32, "word_embed_proj_dim": 16}),
    Architecture("bloom", "causal", {}),
    Architecture("falcon", "causal", {}),
    Architecture("mistral", "causal", {"num_key_value_heads": 1, "sliding_window": 8}),
    Architecture("mixtral", "causal", {"num_key_value_heads": 1, "num_local_experts": 4, "output_router_logits": True}),
    Architecture("qwen2", "causal", {"num_key_value_heads": 1}),
    Architecture("qwen2_moe", "causal", {"num_key_value_heads": 1, "shared_expert_intermediate_size": 16, **EXPERTS}),
    Architecture("qwen3", "causal", {"num_key_value_heads": 1, "head_dim": 8}),
    Architecture("phi", "causal", {}),
    Architecture("phi3", "causal", {"num_key_value_heads": 1}),
    Architecture("gemma", "causal", {"num_key_value_heads": 1, "head_dim": 8}),
    Architecture("gemma2", "causal", {"num_key_value_heads": 1, "head_dim": 8, "sliding_window": 8}),
    Architecture("olmo", "causal", {}),
    Architecture("stablelm", "causal", {"num_key_value_heads": 1}),
    Architecture("mamba", "causal", {"state_size": 4}),
    Architecture("xlnet", "causal", {"d_inner": 32, "d_head": 8, "max_position_embeddings": None}),
    Architecture("bert", "masked", {}),
    Architecture("roberta", "masked", {}),
    Architecture("distilbert", "masked", {"hidden_dim": 32}),
    Architecture("albert", "masked", {"embedding_size": 8}),
    Architecture("electra", "masked", {"embedding_size": 8}),
    Architecture("deberta-v2", "masked", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    Architecture("mpnet", "masked", {}),
    Architecture("t5", "sequences", {"d_kv": 8, "d_ff": 32, "num_decoder_layers": 2, "decoder_start_token_id": 0}),
    Architecture("bart", "sequences", SEQ2SEQ),
    Architecture("marian", "sequences", SEQ2SEQ),
    Architecture("pegasus", "sequences", SEQ2SEQ),
    Architecture("vit", "images", IMAGE),
    Architecture("deit", "images", {**IMAGE, "architectures": ["DeiTForImageClassification"]}),
    Architecture("swin", "images", {**IMAGE, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], **SWIN}),
    Architecture("convnext", "images", {**IMAGE, "num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1]}),
    Architecture("clip", "pairs", {"text_config": TOWER, "vision_config": {**TOWER, **IMAGE}, "projection_dim": 8}),
    Architecture("wav2vec2", "audio", {"conv_dim": [8, 8], "conv_stride": [4, 2], "conv_kernel": [8, 4], **CTC}),
)
WITHOUT_FP64 = ("mixtral", "qwen2_moe")
"""torch's grouped matrix product, which their experts take, has none."""
OF = {one.name: one for one in ALL}
HEADS = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "sequences": "AutoModelForSeq2SeqLM",
    "images": "AutoModelForImageClassification",
    "pairs": "AutoModel",
    "audio": "AutoModelForCTC",
}


def network(one: Architecture) -> torch.nn.Module:
    """Without dropout, of which stages draw their own."""
    import transformers

    given = one.config if one.kind == "pairs" else COMMON | one.config
    config = transformers.AutoConfig.for_model(
        one.name, **{name: value for name, value in given.items() if value is not None}
    )
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    if one.kind == "images":
        config.num_labels = CLASSES
    config.apply_spec_augment = False
    config.num_conv_pos_embeddings, config.num_conv_pos_embedding_groups = 4, 2
    model: torch.nn.Module = getattr(transformers, HEADS[one.kind]).from_config(config)
    return model


def batches(kind: str) -> list[dict[str, Any]]:
    """Of sequences whose ends are padding, which no loss counts."""
    draw = torch.Generator().manual_seed(5)
    return [_batch(kind, draw) for _ in range(STEPS)]


def _batch(kind: str, draw: torch.Generator) -> dict[str, Any]:
    tokens = torch.randint(3, VOCAB, (SAMPLES, LENGTH), generator=draw)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (SAMPLES, 1), generator=draw)
    is_token = torch.arange(LENGTH) < lengths
    text = {"input_ids": tokens.masked_fill(~is_token, 0), "attention_mask": is_token.long()}
    images = torch.randn(SAMPLES, 3, 16, 16, generator=draw)
    if kind == "images":
        return {"pixel_values": images, "labels": torch.randint(0, CLASSES, (SAMPLES,), generator=draw)}
    if kind == "pairs":
        return {**text, "pixel_values": images, "return_loss": True}
    if kind == "audio":
        sound = torch.randn(SAMPLES, 8 * LENGTH + 200, generator=draw)
        return {"input_values": sound, "labels": tokens.masked_fill(~is_token, -100)}
    is_target = is_token & (torch.rand(SAMPLES, LENGTH, generator=draw) < 0.5) if kind == "masked" else is_token
    return {**text, "labels": tokens.masked_fill(~is_target, -100)}


class Training(L.LightningModule):
    """As people write it; `seed` is there so that variants have weights of their own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = network(OF[name])

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fitted(name: str, seed: int, strategy: Any = "auto", ranks: int = 1, **options: Any) -> L.Trainer:
    L.seed_everything(seed, verbose=False)
    module = Training(name)
    loader = DataLoader(batches(OF[name].kind), batch_size=None, generator=torch.Generator().manual_seed(0))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = L.Trainer(strategy=strategy, devices=ranks, max_epochs=1, enable_checkpointing=False, **quiet, **options)
    trainer.fit(module, loader)
    return trainer


def weights(module: L.LightningModule) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in module.state_dict().items()}


def run(me: Rank, *, name: str, mode: str) -> dict[str, Any]:
    """`plain` has what the other modes are compared with."""
    from pl_pipe.strategies import FusionStrategy, PipeDreamStrategy

    warnings.simplefilter("ignore")
    double = {"precision": "32-true" if name in WITHOUT_FP64 else "64-true"}  # arrays add up in another order
    if mode == "plain":
        me.notes["single"] = weights(fitted(name, SEEDS[0]).lightning_module)
        me.notes["variants"] = [weights(fitted(name, seed, **double).lightning_module) for seed in SEEDS]
    elif mode == FUSION:
        fusion = FusionStrategy(seeds=list(SEEDS))
        fitted(name, SEEDS[0], fusion, **double)
        me.notes["variants"] = [weights(variant) for variant in fusion.variants]
        me.notes["facts"] = str(fusion.fusion_facts)
    else:
        count = {"num_microbatches": 1} if mode == WHOLE else {}
        strategy = PipeDreamStrategy(plan="straight", schedule="1f1b", timeout_s=TIMEOUT_S, **count)
        me.notes["single"] = weights(fitted(name, SEEDS[0], strategy, me.ranks).lightning_module)
    return me.notes


def away(mode: str, found: dict[str, Any], plain: dict[str, Any], *, tolerance: float = 1e-6) -> list[str]:
    """In words, what is not as in the plain runs."""
    what = "variants" if mode == FUSION else "single"
    return list(differences(found[what], plain[what], tolerance=tolerance))


def main() -> None:
    """`python architectures.py NAME,… MODE,…`: one after another, for people."""
    import tempfile

    from pipedream_farm import Farm, Order

    names = list(OF) if sys.argv[1:2] in ([], ["all"]) else sys.argv[1].split(",")
    modes = sys.argv[2].split(",") if sys.argv[2:] else list(RANKS)
    farm = Farm(Path(tempfile.mkdtemp()))
    for name in names:
        for mode in modes:
            plain, job = (
                farm.start(Order("ordinary.architectures.run", ranks=ranks, name=name, mode=what))
                for what, ranks in (("plain", 1), (mode, RANKS[mode]))
            )
            try:
                lines = [line for found in job.outcome for line in away(mode, found, plain.outcome[0])]
            except AssertionError as error:
                lines = [str(error)[-1500:], str(job.folder)]
            sys.stdout.write(f"{name:12} {mode:14} {job.seconds:4.1f} s  {'; '.join(lines[:4]) or 'equal'}\n")
            sys.stdout.flush()
    farm.close()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
