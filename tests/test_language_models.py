"""BERT and the language model: published sizes, Hugging Face weights against an oracle, vocabularies, rates."""

import json
import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pl_pipe.errors import CheckpointError, ConfigError, DataError
from pl_pipe.recipes.language.bert import SIZES, BertEncoder, NextSentenceHead, bert_shape
from pl_pipe.recipes.language.layers import SelfAttention
from pl_pipe.recipes.language.pretraining import BertPretraining, masked_labels
from pl_pipe.recipes.language.pretraining_data import SyntheticText
from pl_pipe.recipes.language.question_answering import BertQuestionAnswering
from pl_pipe.recipes.language.training import decay_groups, lr_factor
from pl_pipe.recipes.language.transformer_lm import TransformerLM
from pl_pipe.recipes.language.vocabulary import EMBEDDED, SPECIAL

safetensors = pytest.importorskip("safetensors.torch", reason="of the text extra")
SMALL: dict[str, Any] = {"layers": 2, "hidden": 24, "heads": 3, "feed_forward": 40, "positions": 20}
WORDS = 50


# ---- the networks


@pytest.mark.parametrize(
    ("size", "millions"), [("tiny", 4.385920), ("small", 28.763648), ("medium", 41.373184), ("base", 109.482240)]
)
def test_sizes_are_the_published_ones(size: str, millions: float) -> None:
    """Encoder and pooler, as the authors count them."""
    with torch.device("meta"):
        shape = bert_shape(size, vocabulary=30522)
        parts = nn.ModuleList([BertEncoder(shape), NextSentenceHead(shape).pooler])
    assert sum(p.numel() for p in parts.parameters()) == round(millions * 1e6)


def test_what_fills_a_sequence_up_changes_nothing() -> None:
    torch.manual_seed(0)
    encoder = BertEncoder(bert_shape("tiny", vocabulary=WORDS, **SMALL)).eval()
    ids = torch.randint(WORDS, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    other = ids.clone()
    other[1, 7:] = 3
    first, second = (encoder(given, mask, torch.zeros_like(ids)) for given in (ids, other))
    torch.testing.assert_close(first[0], second[0])
    torch.testing.assert_close(first[1, :7], second[1, :7])
    short = encoder(ids[1:, :7], mask[1:, :7], torch.zeros_like(ids[1:, :7]))
    torch.testing.assert_close(first[1:, :7], short)


def test_attention_is_the_textbooks() -> None:
    torch.manual_seed(1)
    attention = SelfAttention(24, 3, dropout=0.0, causal=True).eval()
    x = torch.randn(2, 5, 24)
    by_head = []
    for head in range(3):
        part = slice(8 * head, 8 * head + 8)
        q, k, v = (linear(x)[..., part] for linear in (attention.query, attention.key, attention.value))
        scores = q @ k.transpose(1, 2) / math.sqrt(8)
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        by_head.append(scores.softmax(-1) @ v)
    torch.testing.assert_close(attention(x), attention.output(torch.cat(by_head, -1)))


def test_a_language_model_does_not_look_ahead() -> None:
    torch.manual_seed(2)
    model = TransformerLM(WORDS, **SMALL).eval()
    tokens = torch.randint(WORDS, (3, 10))
    changed = tokens.clone()
    changed[:, 6:] = 1
    torch.testing.assert_close(model(tokens)[:, :6], model(changed)[:, :6])
    assert not torch.allclose(model(tokens)[:, 6:], model(changed)[:, 6:])
    back = tokens.flip(1)
    assert not torch.allclose(model(tokens)[:, 9], model(torch.cat([back[:, 1:], tokens[:, 9:]], 1))[:, 9])


def test_the_loss_is_the_mean_over_sequences_of_their_masked_words() -> None:
    torch.manual_seed(3)
    model = BertPretraining(size="tiny", vocabulary_size=WORDS, dropout=0.0, **SMALL)
    batch = {
        "input_ids": torch.randint(5, WORDS, (3, 12)),
        "input_mask": torch.ones(3, 12, dtype=torch.long),
        "segment_ids": torch.zeros(3, 12, dtype=torch.long),
        "masked_lm_positions": torch.tensor([[2, 5, 0], [3, 0, 0], [1, 4, 7]]),
        "masked_lm_ids": torch.tensor([[9, 8, 0], [7, 0, 0], [6, 11, 0]]),  # the last word has the number 0
        "next_sentence_labels": torch.tensor([0, 1, 1]),
    }
    assert masked_labels(batch).tolist() == [[9, 8, -100], [7, -100, -100], [6, 11, 0]]
    words, order = model(batch)
    losses = []
    for row, known in enumerate((2, 1, 3)):
        logits = words[row, :known].log_softmax(-1)
        found = [-logits[k, batch["masked_lm_ids"][row, k]] for k in range(known)]
        losses.append(sum(found) / known)
    expected = sum(losses) / 3 + F.cross_entropy(order, batch["next_sentence_labels"])
    torch.testing.assert_close(model.training_step(batch, 0), expected)
    halves = [{name: value[part] for name, value in batch.items()} for part in (slice(0, 1), slice(1, 3))]
    torch.testing.assert_close(
        (model.training_step(halves[0], 0) + 2 * model.training_step(halves[1], 0)) / 3, expected
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": "huge"}, r"recipe.size=huge is unknown; choose one of tiny, small, medium, base"),
        ({"hidden": 30, "heads": 4}, r"recipe.hidden=30 is not divisible by recipe.heads=4"),
        ({"layers": 0}, r"recipe.layers=0 is too small"),
        ({"dropout": 1.0}, r"recipe.dropout=1.0 is no probability below 1"),
        ({"lr": 0.0}, r"recipe.lr=0.0 must be positive"),
        ({"lr_decay": "cosine"}, r"recipe.lr_decay=cosine is unknown; choose one of linear, constant"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BertPretraining(**{"size": "tiny", **settings})


def test_sequences_longer_than_the_positions_are_refused() -> None:
    model = BertQuestionAnswering(size="tiny", **SMALL)
    batch = {name: torch.zeros(1, 21, dtype=torch.long) for name in ("input_ids", "input_mask", "segment_ids")}
    with pytest.raises(ConfigError, match=r"21 tokens, the encoder has 20 positions; .*set recipe.positions=21"):
        model(batch)
    with pytest.raises(ConfigError, match=r"21 tokens, the model has 20 positions"):
        TransformerLM(WORDS, **SMALL)(torch.zeros(1, 21, dtype=torch.long))


# ---- weights of Hugging Face


def random_hugging_face(
    folder: Path, *, seed: int, prefix: str = "bert.", gamma: bool = False, **settings: Any
) -> dict[str, Tensor]:
    """A folder as Hugging Face would save BertForPreTraining with SMALL's sizes."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = SMALL["hidden"], SMALL["feed_forward"]
    shapes: dict[str, tuple[int, ...]] = {}

    def dense(name: str, into: int, out: int) -> None:
        shapes.update({f"{name}.weight": (out, into), f"{name}.bias": (out,)})

    def norm(name: str) -> None:
        scale, shift = ("gamma", "beta") if gamma else ("weight", "bias")
        shapes.update({f"{name}.{scale}": (hidden,), f"{name}.{shift}": (hidden,)})

    for name, rows in (("word", WORDS), ("position", SMALL["positions"]), ("token_type", 2)):
        shapes[f"{prefix}embeddings.{name}_embeddings.weight"] = (rows, hidden)
    norm(f"{prefix}embeddings.LayerNorm")
    for layer in range(SMALL["layers"]):
        base = f"{prefix}encoder.layer.{layer}."
        for name in ("query", "key", "value"):
            dense(f"{base}attention.self.{name}", hidden, hidden)
        dense(f"{base}attention.output.dense", hidden, hidden)
        norm(f"{base}attention.output.LayerNorm")
        dense(f"{base}intermediate.dense", hidden, inner)
        dense(f"{base}output.dense", inner, hidden)
        norm(f"{base}output.LayerNorm")
    dense(f"{prefix}pooler.dense", hidden, hidden)
    dense("cls.predictions.transform.dense", hidden, hidden)
    norm("cls.predictions.transform.LayerNorm")
    shapes["cls.predictions.bias"] = (WORDS,)
    dense("cls.seq_relationship", hidden, 2)
    weights = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    folder.mkdir(exist_ok=True)
    safetensors.save_file(weights, folder / "model.safetensors")
    config = {
        "model_type": "bert", "num_hidden_layers": SMALL["layers"], "hidden_size": hidden,
        "num_attention_heads": SMALL["heads"], "intermediate_size": inner, "vocab_size": WORDS,
        "max_position_embeddings": SMALL["positions"], "type_vocab_size": 2, "hidden_act": "gelu",
        "layer_norm_eps": 1e-12, **settings,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return weights


def oracle(w: dict[str, Tensor], ids: Tensor, mask: Tensor, segments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """BERT in plain functions: hidden states, words at every position, order of segments."""
    w = {name.removeprefix("bert.").replace("gamma", "weight").replace("beta", "bias"): v for name, v in w.items()}

    def dense(name: str, x: Tensor) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-12).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]
        )

    def gelu(x: Tensor) -> Tensor:
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))

    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.token_type_embeddings.weight"][segments]
    x = norm("embeddings.LayerNorm", x + w["embeddings.position_embeddings.weight"][: ids.shape[1]])
    heads, size = SMALL["heads"], SMALL["hidden"] // SMALL["heads"]
    for layer in range(SMALL["layers"]):
        base = f"encoder.layer.{layer}."
        q, k, v = (
            dense(f"{base}attention.self.{name}", x).view(*ids.shape, heads, size).permute(0, 2, 1, 3)
            for name in ("query", "key", "value")
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(size) + (1.0 - mask[:, None, None, :].float()) * -1e9
        mixed = (scores.softmax(-1) @ v).permute(0, 2, 1, 3).reshape(*ids.shape, -1)
        x = norm(f"{base}attention.output.LayerNorm", x + dense(f"{base}attention.output.dense", mixed))
        inner = dense(f"{base}output.dense", gelu(dense(f"{base}intermediate.dense", x)))
        x = norm(f"{base}output.LayerNorm", x + inner)
    order = dense("cls.seq_relationship", torch.tanh(dense("pooler.dense", x[:, 0])))
    found = norm("cls.predictions.transform.LayerNorm", gelu(dense("cls.predictions.transform.dense", x)))
    return x, found @ w["embeddings.word_embeddings.weight"].T + w["cls.predictions.bias"], order


@pytest.mark.parametrize(("seed", "prefix", "gamma"), [(0, "bert.", False), (1, "bert.", True)])
def test_hugging_face_weights_compute_what_an_independent_bert_does(
    tmp_path: Path, seed: int, prefix: str, gamma: bool
) -> None:
    weights = random_hugging_face(tmp_path, seed=seed, prefix=prefix, gamma=gamma)
    model = BertPretraining(size="base", vocabulary_size=WORDS, weights=str(tmp_path)).eval()
    ids = torch.randint(WORDS, (4, 11))
    mask = (torch.arange(11) < torch.tensor([[11], [7], [3], [9]])).long()
    segments = (torch.arange(11) > 4).long().expand(4, -1)
    positions = torch.tensor([[1, 2], [3, 0], [1, 0], [8, 4]])
    hidden, words, order = oracle(weights, ids, mask, segments)
    batch = {"input_ids": ids, "input_mask": mask, "segment_ids": segments, "masked_lm_positions": positions}
    real = mask.bool()
    torch.testing.assert_close(model.encoder(ids, mask, segments)[real], hidden[real], atol=1e-5, rtol=1e-5)
    found_words, found_order = model(batch)
    expected = torch.stack([words[row, positions[row]] for row in range(4)])
    torch.testing.assert_close(found_words, expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(found_order, order, atol=1e-5, rtol=1e-5)
    assert model.masked_words.decoder.weight is model.encoder.embeddings.words.weight


@pytest.mark.parametrize(("layers", "heads", "activation"), [(2, 4, "gelu"), (3, 2, "relu")])
def test_weights_compute_what_transformers_does(tmp_path: Path, layers: int, heads: int, activation: str) -> None:
    transformers = pytest.importorskip("transformers", reason="not needed otherwise")
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=48, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=60,
        hidden_act=activation, max_position_embeddings=30,
    )  # fmt: skip
    torch.manual_seed(layers)
    theirs = transformers.BertForPreTraining(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = BertPretraining(vocabulary_size=WORDS, weights=str(tmp_path)).eval()
    ids, segments = torch.randint(WORDS, (3, 30)), (torch.arange(30) > 12).long().expand(3, -1)
    mask = (torch.arange(30) < torch.tensor([[30], [17], [5]])).long()
    positions = torch.tensor([[1, 29], [3, 16], [2, 4]])
    batch = {"input_ids": ids, "input_mask": mask, "segment_ids": segments, "masked_lm_positions": positions}
    with torch.no_grad():
        expected = theirs(input_ids=ids, attention_mask=mask, token_type_ids=segments)
        words, order = ours(batch)
    torch.testing.assert_close(words, torch.stack([expected.prediction_logits[k, positions[k]] for k in range(3)]))
    torch.testing.assert_close(order, expected.seq_relationship_logits)


def test_a_bare_encoder_starts_question_answering_and_its_head_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = random_hugging_face(tmp_path / "bert", seed=2, prefix="")
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join([*SPECIAL, *(f"w{k}" for k in range(WORDS - 5))]))
    model = BertQuestionAnswering(vocabulary=str(vocabulary), weights=str(tmp_path / "bert"))
    torch.testing.assert_close(model.encoder.layers[1].narrow.weight, weights["encoder.layer.1.output.dense.weight"])
    weights |= {"qa_outputs.weight": torch.ones(2, 24), "qa_outputs.bias": torch.ones(2)}
    safetensors.save_file(weights, tmp_path / "bert" / "model.safetensors")
    model = BertQuestionAnswering(vocabulary=str(vocabulary), weights=str(tmp_path / "bert"))
    assert model.span.classifier.weight.eq(1).all()
    with pytest.raises(DataError, match=r"trained with 50 words, the data's vocabulary has 544; set data.v"):
        BertQuestionAnswering(weights=str(tmp_path / "bert"))


def test_weights_in_several_files_are_read(tmp_path: Path) -> None:
    weights = random_hugging_face(tmp_path, seed=3)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(weights)
    places = {name: f"part-{k % 2}.safetensors" for k, name in enumerate(names)}
    for part in set(places.values()):
        safetensors.save_file({n: weights[n] for n in names if places[n] == part}, tmp_path / part)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    model = BertPretraining(vocabulary_size=WORDS, weights=str(tmp_path))
    torch.testing.assert_close(model.masked_words.decoder.bias.data, weights["cls.predictions.bias"])


def test_bad_weights_are_refused(tmp_path: Path) -> None:
    def built(**settings: Any) -> BertPretraining:
        return BertPretraining(**{"vocabulary_size": WORDS, "weights": str(tmp_path), **settings})

    with pytest.raises(DataError, match=r"has no config.json; give a folder with config.json and model.safetensors"):
        built()
    weights = random_hugging_face(tmp_path, seed=4, model_type="roberta")
    with pytest.raises(DataError, match=r"holds a roberta model"):
        built()
    random_hugging_face(tmp_path, seed=4, hidden_act="silu")
    with pytest.raises(DataError, match=r"needs the activation silu; known: gelu, relu"):
        built()
    random_hugging_face(tmp_path, seed=4, intermediate_size=41)
    with pytest.raises(CheckpointError, match=r"layers.0.narrow.weight as \[24, 40\], the model as \[24, 41\]"):
        built()
    random_hugging_face(tmp_path, seed=4)
    lacking = {name: value for name, value in weights.items() if "layer.1.output.dense" not in name}
    safetensors.save_file(lacking, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks 2 weights of the encoder, among them encoder.layers.1.narrow"):
        built()
    safetensors.save_file({**weights, "lstm.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no place for: lstm.weight"):
        built()
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged or cut short"):
        built()
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"does not exist; convert it to safetensors"):
        built()


# ---- vocabularies and learning rates


def test_weights_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    """Equally many words, two of them exchanged: no shape would tell."""
    words = EMBEDDED.read_text().split("\n")
    words[100], words[101] = words[101], words[100]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    trained, other = (
        BertPretraining(size="tiny", vocabulary=path, **SMALL) for path in (None, str(tmp_path / "vocab.txt"))
    )
    with pytest.raises(CheckpointError, match=r"another vocabulary \(544 tokens, .*set data.vocabulary to"):
        other.load_state_dict(trained.state_dict())
    BertPretraining(size="tiny", **SMALL).load_state_dict(trained.state_dict())
    BertPretraining(size="tiny", vocabulary_size=544, **SMALL).load_state_dict(trained.state_dict())
    cased, uncased = (BertQuestionAnswering(size="tiny", lowercase=lowercase, **SMALL) for lowercase in (False, True))
    with pytest.raises(CheckpointError, match=r"and data.lowercase as it was"):
        cased.load_state_dict(uncased.state_dict())


def test_the_rate_rises_and_falls() -> None:
    factors = [lr_factor(step, warmup_steps=4, total_steps=12, decay="linear") for step in range(13)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[5:] == pytest.approx([1 - k / 8 for k in range(1, 9)])
    assert lr_factor(20, warmup_steps=4, total_steps=12, decay="linear") == 0.0
    assert lr_factor(20, warmup_steps=4, total_steps=12, decay="constant") == 1.0


def test_biases_and_norms_do_not_decay_and_tied_weights_count_once() -> None:
    model = BertPretraining(size="tiny", **SMALL)
    decaying, others = decay_groups(model, 0.01)
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.01, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)].rsplit(".", 1)[-1] for p in decaying["params"]} == {"weight"}
    assert all("norm" in names[id(p)] or names[id(p)].endswith("bias") for p in others["params"])
    assert len(decaying["params"]) + len(others["params"]) == len(names) == len(list(model.parameters()))


def test_the_sizes_that_listings_show_exist() -> None:
    assert set(SIZES) == {"tiny", "small", "medium", "base"}


def test_masked_words_of_the_embedded_corpus_are_learnt() -> None:
    """A small encoder in a few seconds: below half of the loss of guessing among all words."""
    L.seed_everything(0)
    data = SyntheticText(num_documents=256, num_val_documents=16, batch_size=32)
    model = BertPretraining(
        size="tiny", layers=1, hidden=32, heads=2, positions=32, dropout=0.0, lr=1e-2, warmup_steps=5
    )
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(model, datamodule=data)
    assert trainer.callback_metrics["val_mlm_loss"] < math.log(544) / 2
