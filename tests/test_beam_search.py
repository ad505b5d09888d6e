"""Beam search against exhaustion, and against searching sentence by sentence."""

import itertools
import math

import pytest
import torch
from test_translation_network import batch, network

from pl_pipe.recipes.translation.beam_search import BeamSettings, beam_search
from pl_pipe.recipes.translation.gnmt import Gnmt
from pl_pipe.recipes.translation.special_ids import BEGIN, END, PAD

VOCABULARY = 7  # three words besides the special tokens
MAX_LENGTH = 3


def sharp(seed: int) -> Gnmt:
    """A network with pronounced opinions, so that no two translations are worth the same."""
    model = network(seed=seed, vocabulary=VOCABULARY, encoder_layers=2, decoder_layers=2)
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    return model


def worths(
    model: Gnmt, source: torch.Tensor, lengths: torch.Tensor, sentences: list[list[int]], settings: BeamSettings
) -> list[float]:
    """The formula for translations of one length, from one pass over each."""
    target = torch.tensor([[BEGIN, *tokens] for tokens in sentences])
    source, lengths = source.expand(len(target), -1), lengths.expand(len(target))
    memory = model.encoder(model.source_embedding(source), lengths)
    x, _ = model.decoder.first(model.target_embedding(target))
    _, weights = model.decoder.attention(x, memory, lengths)
    following = torch.tensor([[*tokens, END] for tokens in sentences])
    logs = model(source, lengths, target).log_softmax(dim=2).gather(2, following.unsqueeze(2))[..., 0].sum(dim=1)
    seen = weights.sum(dim=1).clamp(max=1.0).log().sum(dim=1)
    penalty = ((5 + target.shape[1]) / 6) ** settings.length_normalisation
    found: list[float] = (logs / penalty + settings.coverage_penalty * seen).tolist()
    return found


def search(model: Gnmt, source: torch.Tensor, lengths: torch.Tensor, settings: BeamSettings) -> list[list[int]]:
    limits = torch.full_like(lengths, MAX_LENGTH)
    return beam_search(model, source, lengths, limits_N=limits, settings=settings)


@pytest.mark.parametrize("settings", [(0.0, 0.0), (0.6, 0.0), (0.6, 0.1), (1.0, 0.5)], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_a_wide_beam_finds_the_best_of_all(seed: int, settings: tuple[float, float]) -> None:
    model = sharp(seed)
    source, lengths, _ = batch(vocabulary=VOCABULARY, seed=seed)
    wide = BeamSettings(100, *settings)  # there are 85 translations
    found = search(model, source, lengths, wide)
    words = [token for token in range(VOCABULARY) if token not in (PAD, BEGIN, END)]
    for row in range(len(source)):
        one = (source[row : row + 1, : int(lengths[row])], lengths[row : row + 1])
        ranked: list[tuple[float, list[int]]] = []
        for length in range(MAX_LENGTH + 1):
            sentences = [list(chosen) for chosen in itertools.product(words, repeat=length)]
            ranked += zip(worths(model, *one, sentences, wide), sentences, strict=True)
        assert found[row] == max(ranked)[1]


@pytest.mark.parametrize("seed", range(4))
def test_one_beam_is_greedy(seed: int) -> None:
    model = sharp(seed)
    source, lengths, _ = batch(vocabulary=VOCABULARY, seed=seed)
    found = search(model, source, lengths, BeamSettings(1, 0.6, 0.1))
    for row in range(len(source)):
        tokens: list[int] = []
        while len(tokens) <= MAX_LENGTH:
            target = torch.tensor([[BEGIN, *tokens]])
            logits = model(source[row : row + 1], lengths[row : row + 1], target)[0, -1]
            logits[[PAD, BEGIN]] = -math.inf
            token = int(logits.argmax())
            if token == END or len(tokens) == MAX_LENGTH:
                break
            tokens.append(token)
        assert found[row] == tokens


@pytest.mark.parametrize("beams", [2, 5])
@pytest.mark.parametrize("ends", [True, False])
def test_a_batch_is_its_sentences(beams: int, ends: bool) -> None:
    """Neighbours, padding and others' limits have no say, and ending early loses nothing."""
    model = sharp(7)
    if not ends:
        model.classifier.bias.data[END] = -3.0  # some reach their limits
    source, lengths, _ = batch(sentences=6, vocabulary=VOCABULARY, seed=5)
    settings, limits = BeamSettings(beams, 0.6, 0.1), lengths + 2
    together = beam_search(model, source, lengths, limits_N=limits, settings=settings)
    for row, length in enumerate(lengths.tolist()):
        one = slice(row, row + 1)
        alone = beam_search(model, source[one, :length], lengths[one], limits_N=limits[one], settings=settings)
        assert alone == [together[row]]


def test_what_never_ends_is_cut() -> None:
    model = sharp(1)
    model.classifier.bias.data[END] = -1e4
    source, lengths, _ = batch(vocabulary=VOCABULARY)
    found = beam_search(model, source, lengths, limits_N=lengths, settings=BeamSettings(2, 0.6, 0.1))
    assert [len(tokens) for tokens in found] == lengths.tolist()


def test_ids_without_a_meaning_are_never_said() -> None:
    """A network may have room for more tokens than the vocabulary has."""
    model = sharp(0)
    source, lengths, _ = batch(vocabulary=VOCABULARY, seed=0)
    model.classifier.bias.data[VOCABULARY - 2 :] += 5.0
    settings = BeamSettings(3, 0.6, 0.1)
    free = beam_search(model, source, lengths, limits_N=lengths, settings=settings)
    bound = beam_search(model, source, lengths, limits_N=lengths, settings=settings, tokens=VOCABULARY - 2)
    assert max(itertools.chain.from_iterable(free)) >= VOCABULARY - 2
    assert max(itertools.chain.from_iterable(bound), default=0) < VOCABULARY - 2
