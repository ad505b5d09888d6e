"""BERT weights as Hugging Face stores them: a local folder with `config.json` and `model.safetensors`.

Every name of theirs is translated into one of ours. A head that the file lacks keeps its own start (fine-tuning begins
so); an encoder weight that it lacks, or one of another shape, is an error before anything is loaded.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pl_pipe.errors import CheckpointError, DataError
from pl_pipe.log import get_logger

from ..extras import needed
from .bert import BertShape
from .layers import ACTIVATIONS

log = get_logger(__name__)

_FILE, _CONFIG, _INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"
_PATTERNS: tuple[tuple[str, str], ...] = (
    (r"embeddings\.word_embeddings\.(.*)", r"encoder.embeddings.words.\1"),
    (r"embeddings\.position_embeddings\.(.*)", r"encoder.embeddings.positions.\1"),
    (r"embeddings\.token_type_embeddings\.(.*)", r"encoder.embeddings.segments.\1"),
    (r"embeddings\.LayerNorm\.(.*)", r"encoder.embeddings.norm.\1"),
    (r"encoder\.layer\.(\d+)\.attention\.self\.(query|key|value)\.(.*)", r"encoder.layers.\1.attention.\2.\3"),
    (r"encoder\.layer\.(\d+)\.attention\.output\.dense\.(.*)", r"encoder.layers.\1.attention.output.\2"),
    (r"encoder\.layer\.(\d+)\.attention\.output\.LayerNorm\.(.*)", r"encoder.layers.\1.attention_norm.\2"),
    (r"encoder\.layer\.(\d+)\.intermediate\.dense\.(.*)", r"encoder.layers.\1.widen.\2"),
    (r"encoder\.layer\.(\d+)\.output\.dense\.(.*)", r"encoder.layers.\1.narrow.\2"),
    (r"encoder\.layer\.(\d+)\.output\.LayerNorm\.(.*)", r"encoder.layers.\1.output_norm.\2"),
    (r"pooler\.dense\.(.*)", r"next_sentence.pooler.\1"),
    (r"cls\.predictions\.bias", r"masked_words.decoder.bias"),
    (r"cls\.predictions\.decoder\.(.*)", r"masked_words.decoder.\1"),
    (r"cls\.predictions\.transform\.dense\.(.*)", r"masked_words.transform.\1"),
    (r"cls\.predictions\.transform\.LayerNorm\.(.*)", r"masked_words.norm.\1"),
    (r"cls\.seq_relationship\.(.*)", r"next_sentence.classifier.\1"),
    (r"qa_outputs\.(.*)", r"span.classifier.\1"),
)


def our_name(theirs: str) -> str | None:
    """What a weight is called here; None where nothing here has its place."""
    bare = theirs.removeprefix("bert.").replace("LayerNorm.gamma", "LayerNorm.weight")
    bare = bare.replace("LayerNorm.beta", "LayerNorm.bias")
    for pattern, ours in _PATTERNS:
        if re.fullmatch(pattern, bare):
            return re.sub(pattern, ours, bare)
    return None


def read_shape(folder: str, *, wanted: BertShape) -> BertShape:
    """The shape that `config.json` tells; the vocabulary must be the data's, dropout stays as wanted."""
    config = _read_config(folder)
    try:
        found = BertShape(
            layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            heads=int(config["num_attention_heads"]),
            feed_forward=int(config["intermediate_size"]),
            vocabulary=int(config["vocab_size"]),
            positions=int(config.get("max_position_embeddings", 512)),
            segments=int(config.get("type_vocab_size", 2)),
            dropout=wanted.dropout,
            activation=str(config.get("hidden_act", "gelu")),
            norm_epsilon=float(config.get("layer_norm_eps", 1e-12)),
        )
    except KeyError as error:
        raise DataError(f"{Path(folder) / _CONFIG} has no {error}; is it a BERT model's?") from error
    if config.get("model_type", "bert") != "bert":
        raise DataError(f"recipe.weights={folder} holds a {config['model_type']} model; give a BERT model's folder")
    if found.activation not in ACTIVATIONS:
        raise DataError(
            f"recipe.weights={folder} needs the activation {found.activation}; known: {', '.join(ACTIVATIONS)}"
        )
    if config.get("position_embedding_type", "absolute") != "absolute":
        kind = config["position_embedding_type"]
        raise DataError(f"recipe.weights={folder} has {kind} positions; give a model with absolute ones")
    if found.vocabulary != wanted.vocabulary:
        raise DataError(
            f"recipe.weights={folder} was trained with {found.vocabulary} words, the data's vocabulary has "
            f"{wanted.vocabulary}; set data.vocabulary={Path(folder) / 'vocab.txt'}"
        )
    return found


def load_weights(module: nn.Module, folder: str) -> list[str]:
    """Fills the module from the folder's weights; returns the names that the files did not have."""
    own = module.state_dict()
    found: dict[str, Tensor] = {}
    unknown: list[str] = []
    for theirs, value in _read_tensors(Path(folder).expanduser()).items():
        ours = our_name(theirs)
        if ours in own:
            found[str(ours)] = value
        elif ours is None and not theirs.endswith("position_ids"):
            unknown.append(theirs)
    if unknown:
        raise CheckpointError(
            f"{folder} has weights that BERT has no place for: {', '.join(sorted(unknown)[:3])}"
            f"{', …' if len(unknown) > 3 else ''}; give a BERT model's folder"
        )
    for name, value in sorted(found.items()):
        if value.shape != own[name].shape:
            raise CheckpointError(
                f"{folder} has {name} as {list(value.shape)}, the model as {list(own[name].shape)}; its config.json "
                "tells another shape than its weights have"
            )
    missing = [name for name, _ in module.named_parameters() if name not in found]
    encoder = [name for name in missing if name.startswith("encoder.")]
    if encoder:
        raise CheckpointError(
            f"{folder} lacks {len(encoder)} weights of the encoder, among them {encoder[0]}; fetch the whole model"
        )
    with torch.no_grad():
        for name, value in found.items():
            own[name].copy_(value)
    if missing:
        log.info("%s has no weights for %s, which start anew", folder, ", ".join(missing))
    return missing


def _read_config(folder: str) -> dict[str, Any]:
    path = Path(folder).expanduser() / _CONFIG
    if not path.is_file():
        raise DataError(f"recipe.weights={folder} has no {_CONFIG}; give a folder with {_CONFIG} and {_FILE}")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise DataError(f"{path} is no JSON ({error}); fetch the model anew") from error
    if not isinstance(config, dict):
        raise DataError(f"{path} holds no settings; fetch the model anew")
    return config


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder's one file, or of those that its index names."""
    files = [folder / _FILE]
    if (folder / _INDEX).is_file():
        files = [
            folder / name for name in sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
        ]
    load_file = needed("safetensors.torch").load_file
    tensors: dict[str, Tensor] = {}
    for file in files:
        if not file.is_file():
            remedy = "convert it to safetensors" if list(folder.glob("*.bin")) else "fetch it"
            raise DataError(f"{file} does not exist; {remedy}")
        try:
            tensors |= load_file(file)
        except Exception as error:  # the library has an error of its own, without a base but Exception
            raise CheckpointError(f"{file} is damaged or cut short ({error}); fetch it anew") from error
    return tensors
