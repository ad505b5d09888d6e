"""GNMT's layers against torch's own, and what a batch's padding must not change."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from pl_pipe.errors import ConfigError
from pl_pipe.recipes.translation.gnmt import BidirectionalLayer, Gnmt, NormalisedAttention
from pl_pipe.recipes.translation.learning_rate import gnmt_lr_factor
from pl_pipe.recipes.translation.special_ids import BEGIN, END, PAD
from pl_pipe.recipes.translation.translator import Translator

HIDDEN = 6


def network(*, seed: int = 0, vocabulary: int = 11, **settings: object) -> Gnmt:
    torch.manual_seed(seed)
    given = {"encoder_layers": 3, "decoder_layers": 3, "hidden_size": HIDDEN, "dropout": 0.0, "share_embedding": False}
    return Gnmt(vocabulary, **(given | settings)).eval()  # type: ignore[arg-type]


def batch(*, sentences: int = 4, longest: int = 7, vocabulary: int = 11, seed: int = 0) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (sentences,), generator=draw)
    lengths[0] = longest
    source = torch.randint(4, vocabulary, (sentences, longest), generator=draw)
    source[torch.arange(longest) >= lengths[:, None]] = PAD
    target = torch.randint(4, vocabulary, (sentences, 5), generator=draw)
    target[:, 0] = BEGIN
    target[1, 3:] = PAD
    target[1, 2] = END
    return source, lengths, target


@pytest.mark.parametrize("seed", [0, 1])
def test_both_directions_are_torchs_packed_lstm(seed: int) -> None:
    torch.manual_seed(seed)
    ours = BidirectionalLayer(HIDDEN)
    theirs = nn.LSTM(HIDDEN, HIDDEN, batch_first=True, bidirectional=True)
    for name, value in theirs.named_parameters():
        side = ours.leftward if name.endswith("_reverse") else ours.rightward
        side.get_parameter(name.removesuffix("_reverse")).data.copy_(value)
    lengths = torch.tensor([5, 1, 8, 3])
    x = torch.randn(4, 8, HIDDEN)
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    expected, _ = pad_packed_sequence(theirs(packed)[0], batch_first=True)
    found = ours(x, lengths)
    for row, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(found[row, :length], expected[row, :length])


def test_attention_is_its_formula() -> None:
    torch.manual_seed(0)
    attention = NormalisedAttention(HIDDEN)
    score = attention.score
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    query, memory, lengths = torch.randn(2, 3, HIDDEN), torch.randn(2, 4, HIDDEN), torch.tensor([4, 2])
    contexts, weights = attention(query, memory, lengths)
    for n in range(2):
        for t in range(3):
            sums = []
            for s in range(int(lengths[n])):
                inner = attention.query.weight @ query[n, t] + attention.key.weight @ memory[n, s] + score.bias
                v = score.length * score.direction / score.direction.norm()
                sums.append((v * torch.tanh(inner)).sum())
            expected = torch.softmax(torch.stack(sums), dim=0)
            torch.testing.assert_close(weights[n, t, : len(sums)], expected)
            assert weights[n, t, len(sums) :].eq(0).all()
            torch.testing.assert_close(contexts[n, t], expected @ memory[n, : len(sums)])


@pytest.mark.parametrize("layers", [2, 4])
def test_padding_changes_nothing(layers: int) -> None:
    model = network(encoder_layers=layers, decoder_layers=layers)
    source, lengths, target = batch()
    logits = model(source, lengths, target)
    for row, length in enumerate(lengths.tolist()):
        alone = model(source[row : row + 1, :length], lengths[row : row + 1], target[row : row + 1])
        torch.testing.assert_close(alone[0], logits[row], atol=1e-6, rtol=1e-5)
    longer = nn.functional.pad(source, (0, 5), value=PAD)
    torch.testing.assert_close(model(longer, lengths, target), logits, atol=1e-6, rtol=1e-5)


def test_steps_are_the_whole_sequence() -> None:
    model = network(decoder_layers=4)
    source, lengths, target = batch(seed=3)
    expected = model(source, lengths, target)
    memory = model.encoder(model.source_embedding(source), lengths)
    keys, state = model.decoder.attention.key(memory), None
    for place in range(target.shape[1]):
        embedded = model.target_embedding(target[:, place : place + 1])
        out, _, state = model.decoder.step(embedded, memory, lengths, keys, state)
        torch.testing.assert_close(model.classifier(out)[:, 0], expected[:, place], atol=1e-6, rtol=1e-5)


def test_a_shared_embedding_is_one() -> None:
    apart, shared = network(), network(share_embedding=True)
    assert shared.target_embedding is shared.source_embedding
    assert sum(p.numel() for p in apart.parameters()) - sum(p.numel() for p in shared.parameters()) == 11 * HIDDEN


def test_residuals_and_layers_are_counted_as_published() -> None:
    """4 + 4 layers, of which the first encoder layer has two directions: 9 LSTMs; 8 + 8: 17."""
    for layers in (4, 8):
        model = network(encoder_layers=layers, decoder_layers=layers)
        assert sum(isinstance(module, nn.LSTM) for module in model.modules()) == 2 * layers + 1
    # A last layer that puts out nothing passes on what it got: only a residual connection does that.
    model = network(encoder_layers=3)
    source, lengths, _ = batch()
    whole = model.encoder(model.source_embedding(source), lengths)
    for parameter in model.encoder.layers[-1].parameters():
        nn.init.zeros_(parameter)
    first = model.encoder.first(model.source_embedding(source), lengths)
    torch.testing.assert_close(
        model.encoder(model.source_embedding(source), lengths), model.encoder.layers[0](first)[0]
    )
    assert not torch.equal(whole, model.encoder.layers[0](first)[0])


def translator(**settings: object) -> Translator:
    torch.manual_seed(0)
    given = {"vocabulary_size": 11, "encoder_layers": 2, "decoder_layers": 2, "hidden_size": HIDDEN, "dropout": 0.0}
    module = Translator(**(given | settings))  # type: ignore[arg-type]
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    return module


def test_the_loss_is_a_mean_over_sentences_of_smoothed_sums() -> None:
    module = translator(label_smoothing=0.1)
    source, lengths, target = batch(seed=1)
    loss = module.training_step((source, lengths, target), 0)
    logs = module(source, lengths, target[:, :-1]).log_softmax(dim=2).detach()
    total = 0.0
    for n in range(len(source)):
        for t, label in enumerate(target[n, 1:].tolist()):
            if label != PAD:
                total += float(-0.9 * logs[n, t, label] - 0.1 * logs[n, t].mean())
    assert float(loss) == pytest.approx(total / len(source), rel=1e-5)
    # So the parts of a batch add up to it, whatever their lengths: what synchronous micro-batches rely on.
    parts = [module.training_step((source[i : i + 2], lengths[i : i + 2], target[i : i + 2]), 0) for i in (0, 2)]
    assert float(sum(parts) / 2) == pytest.approx(float(loss), rel=1e-6)


def test_validation_counts_tokens() -> None:
    module = translator()
    source, lengths, target = batch(seed=2)
    module.validation_step((source, lengths, target), 0)
    logs = module(source, lengths, target[:, :-1]).log_softmax(dim=2)
    words = target[:, 1:] != PAD
    expected = -logs.gather(2, target[:, 1:, None])[..., 0][words].mean()
    torch.testing.assert_close(module.token_loss.compute(), expected)
    scores = module.predict_step((source, lengths, target), 0)
    assert scores["tokens"].tolist() == words.sum(dim=1).tolist()
    assert float(scores["log_probability"].sum()) == pytest.approx(-float(expected) * int(words.sum()), rel=1e-5)


def test_the_learning_rate_warms_up_stays_and_falls_in_steps() -> None:
    settings = {"total_steps": 100, "warmup_steps": 10, "decay_from": 0.6, "decay_times": 4, "decay_factor": 0.5}
    found = [gnmt_lr_factor(step, **settings) for step in range(120)]  # type: ignore[arg-type]
    assert found[0] == pytest.approx(0.01)
    assert found[5] == pytest.approx(0.1)
    assert found[10:60] == [1.0] * 50
    assert [found[step] for step in (60, 69, 70, 80, 90, 119)] == [0.5, 0.5, 0.25, 0.125, 0.0625, 0.0625]
    short = [gnmt_lr_factor(step, **settings | {"total_steps": 6}) for step in range(6)]  # type: ignore[arg-type]
    assert short[3] == 1.0, "a run shorter than its warm-up still gets there"


@pytest.mark.parametrize(
    "wrong",
    [
        {"encoder_layers": 1},
        {"dropout": 1.0},
        {"lr": 0.0},
        {"decay_from": 2.0},
        {"warmup_steps": -1},
        {"hidden_size": 0},
    ],
)
def test_settings_out_of_range_are_named(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"recipe.{next(iter(wrong))}="):
        translator(**wrong)


def test_the_published_experiments_rate_falls_by_epochs() -> None:
    """(1 - e/E)² in each of 3 epochs of 4 steps, from the first step on; beyond the last it stays."""
    model = Translator(16, 2, 2, hidden_size=4, lr=0.5, weight_decay=0.25, lr_policy="polynomial")
    model.trainer = SimpleNamespace(  # type: ignore[assignment]
        estimated_stepping_batches=12, num_training_batches=4, accumulate_grad_batches=1
    )
    chosen = model.configure_optimizers()
    optimizer, scheduler = chosen["optimizer"], chosen["lr_scheduler"]["scheduler"]
    assert chosen["lr_scheduler"]["interval"] == "step"
    assert optimizer.param_groups[0]["weight_decay"] == 0.25
    found = []
    for _ in range(14):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert found == pytest.approx([0.5 * (1 - epoch / 3) ** 2 for epoch in (0, 1, 2) for _ in range(4)] + [0.5 / 9] * 2)
