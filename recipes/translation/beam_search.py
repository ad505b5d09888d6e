"""Beam search for many sentences at a time. encoder's memory -> *beam search* -> the best ids of each sentence.

A finished translation Y of X is worth (Wu et al. 2016, eq. 14)

    log P(Y|X) / ((5 + |Y|) / 6)^α  +  β · Σ_i log(min(Σ_j attention_ij, 1))

where |Y| counts its tokens and the end, and the second sum rewards it for having looked at every source position. A
translation may end where its end is among the K best ways to go on; one beam is greedy search. The search ends when no
unfinished translation of any sentence could still become worth more than its best finished one.
"""

# N sentences, K beams, S source positions, V vocabulary, T steps so far

from dataclasses import dataclass

import torch
from torch import Tensor

from .gnmt import Gnmt, State
from .special_ids import BEGIN, END, PAD

_NEVER = -1e9  # a log-probability that loses against any other, and survives arithmetic
_CUT = -1e8  # of a translation that has not finished: worth less than any that has


@dataclass(frozen=True)
class BeamSettings:
    """How wide to search and what finished translations are ranked by."""

    size: int = 5
    length_normalisation: float = 0.6
    """α; 0 ranks by probability, which favours short translations."""
    coverage_penalty: float = 0.1
    """β"""


@torch.inference_mode()
def beam_search(
    model: Gnmt,
    source_NS: Tensor,
    lengths_N: Tensor,
    *,
    limits_N: Tensor,
    settings: BeamSettings,
    tokens: int | None = None,
) -> list[list[int]]:
    """The best translation of each sentence, without `BEGIN` and `END`; of at most so many tokens as its limit.

    `tokens` says how many ids mean something, where the network has room for more.

    A sentence for which nothing finished in that many steps gets its most probable unfinished translation. What else
    is in the batch has no say.
    """
    sentences, beams = source_NS.shape[0], settings.size
    memory_NSH = model.encoder(model.source_embedding(source_NS), lengths_N)
    keys_NSH = model.decoder.attention.key(memory_NSH)
    memory, keys, lengths = (repeated(tensor, beams) for tensor in (memory_NSH, keys_NSH, lengths_N))
    device = source_NS.device
    alive = _Alive(
        tokens_NKT=torch.full((sentences, beams, 1), BEGIN, device=device),
        log_p_NK=torch.tensor([0.0] + [_NEVER] * (beams - 1), device=device).repeat(sentences, 1),
        coverage_NKS=torch.zeros(sentences, beams, source_NS.shape[1], device=device),
    )
    most = int(limits_N.max())
    finished = _Finished(
        tokens_NT=torch.full((sentences, most + 1), PAD, device=device),
        score_N=torch.full((sentences,), _NEVER, device=device),
    )
    words_NS = torch.arange(source_NS.shape[1], device=device) < lengths_N.unsqueeze(1)
    state: State | None = None
    for step in range(1, most + 2):  # a sentence's last step may only end
        embedded = model.target_embedding(alive.tokens_NKT[:, :, -1].reshape(-1, 1))
        out, weights, state = model.decoder.step(embedded, memory, lengths, keys, state)
        log_p = model.classifier(out[:, 0]).float().log_softmax(dim=1)
        log_p[:, [PAD, BEGIN]] = _NEVER
        if tokens is not None:
            log_p[:, tokens:] = _NEVER
        coverage_NKS = alive.coverage_NKS + weights[:, 0].view_as(alive.coverage_NKS)
        total_NKV = alive.log_p_NK.unsqueeze(2) + log_p.view(sentences, beams, -1)
        penalty_NK = settings.coverage_penalty * _coverage(coverage_NKS, words_NS)
        ended_NK = total_NKV[:, :, END] / _length_penalty(step, settings.length_normalisation) + penalty_NK
        may_NK = _may_end(total_NKV) & (step <= limits_N + 1).unsqueeze(1)
        finished.take(ended_NK.masked_fill(~may_NK, _NEVER), alive.tokens_NKT)
        last_N = limits_N + 1 == step
        finished.take(torch.where(last_N, _CUT, _NEVER).unsqueeze(1), alive.tokens_NKT[:, :1])
        if bool((_settled(alive, finished, limits_N, settings) | (step > limits_N)).all()):
            break
        total_NKV[:, :, END] = _NEVER
        vocabulary = total_NKV.shape[2]
        log_p_NK, chosen_NK = total_NKV.flatten(1).topk(beams, dim=1)
        parents_NK, tokens_NK = chosen_NK // vocabulary, chosen_NK % vocabulary
        alive = alive.grown(parents_NK, tokens_NK, log_p_NK, coverage_NKS)
        rows = (torch.arange(sentences, device=device).unsqueeze(1) * beams + parents_NK).flatten()
        state = [(hidden[:, rows], cell[:, rows]) for hidden, cell in state]
    return [[token for token in row[1:] if token != PAD] for row in finished.tokens_NT.tolist()]


@dataclass(frozen=True)
class _Alive:
    """Translations that go on."""

    tokens_NKT: Tensor
    log_p_NK: Tensor
    coverage_NKS: Tensor

    def grown(self, parents_NK: Tensor, tokens_NK: Tensor, log_p_NK: Tensor, coverage_NKS: Tensor) -> "_Alive":
        before = self.tokens_NKT.gather(1, parents_NK.unsqueeze(2).expand(-1, -1, self.tokens_NKT.shape[2]))
        coverage = coverage_NKS.gather(1, parents_NK.unsqueeze(2).expand(-1, -1, coverage_NKS.shape[2]))
        return _Alive(torch.cat((before, tokens_NK.unsqueeze(2)), dim=2), log_p_NK, coverage)


@dataclass
class _Finished:
    """The best finished translation of each sentence so far."""

    tokens_NT: Tensor
    score_N: Tensor

    def take(self, ended_NK: Tensor, tokens_NKT: Tensor) -> None:
        score_N, beam_N = ended_NK.max(dim=1)
        better_N = score_N > self.score_N
        width = tokens_NKT.shape[2]
        found_NT = tokens_NKT.gather(1, beam_N.view(-1, 1, 1).expand(-1, 1, width))[:, 0]
        found_NT = torch.nn.functional.pad(found_NT, (0, self.tokens_NT.shape[1] - width), value=PAD)
        self.tokens_NT = torch.where(better_N.unsqueeze(1), found_NT, self.tokens_NT)
        self.score_N = torch.where(better_N, score_N, self.score_N)


def repeated(tensor: Tensor, times: int) -> Tensor:
    """Each row `times` times in a row: [N, …] -> [N·K, …]."""
    return tensor.repeat_interleave(times, dim=0)


def _may_end(total_NKV: Tensor) -> Tensor:
    """Beams whose end is among the best ways to go on, of as many as there are beams."""
    least_N1 = total_NKV.flatten(1).topk(total_NKV.shape[1], dim=1).values[:, -1:]
    ends_NK = total_NKV[:, :, END]
    return (ends_NK >= least_N1) & (ends_NK > _NEVER / 2)


def _length_penalty(tokens: int | Tensor, alpha: float) -> float | Tensor:
    return ((5 + tokens) / 6) ** alpha


def _coverage(coverage_NKS: Tensor, words_NS: Tensor) -> Tensor:
    logs_NKS = coverage_NKS.clamp(min=1e-30, max=1.0).log()
    return logs_NKS.masked_fill(~words_NS.unsqueeze(1), 0.0).sum(dim=2)


def _settled(alive: _Alive, finished: _Finished, limits_N: Tensor, settings: BeamSettings) -> Tensor:
    """Where no unfinished translation can win: it gets no more probable, and its coverage is worth 0 at best."""
    best_N = alive.log_p_NK[:, 0] / _length_penalty(limits_N + 1, settings.length_normalisation)
    return finished.score_N >= best_N
