"""Makes docs/support.md of the tests that are marked with features. marked tests -> *this* -> docs/support.md

    python tests/support_matrix.py           writes the page (`make support-matrix`)
    python tests/support_matrix.py --check   fails if the page is not what the tests say

A test names what it covers: `@pytest.mark.feature("max_steps", group="stopping", mode="synchronous")`, with
`outcome="refused"` where it shows a refusal. A page can therefore claim nothing that no test shows.
"""

import contextlib
import io
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "support.md"
GROUPS = ("optimization", "validation", "stopping", "logging", "checkpoints", "data", "model", "calls", "launch")
MODES = ("synchronous", "asynchronous")
HEAD = """# What of Lightning works over a pipeline

Made of the tests by `make support-matrix`: every line is shown by the tests it names, which run on every change.
Synchronous schedules are `1f1b` and `gpipe`: *works* means that everything observable equals the single-process run
(losses, metrics, logged rows, hooks in their order, weights). Asynchronous ones are `pipedream` and `pipedream_2bw`:
*works* means the same hooks as often, one state on all ranks, and where a reference is written out the numbers of the
published rule. *Refused* means an error on every rank that names the remedy: at setup, or at the batch where only that
shows it. Explanations and limits are in [pipeline.md](pipeline.md).
"""

SCRIPTS_HEAD = """## Ordinary scripts

`tests/ordinary/scripts` are written as their authors would write them, without a thought of pl-pipe. `pytest
tests/ordinary` (with `PL_PIPE_SLOW=1`) runs each in a plain Trainer and under these strategies.
*Equal*: the weights of all models on all ranks, returned values, metrics, steps and epochs, and the checkpoints' keys,
weights and optimizer states; those of a variant to a plain run with its seed, those of `adaptive` to DDP's over as many
ranks. *Runs*: to its end, with other numbers, for the reason given; those of `pipedream` are of older weights.
*Refused*: before or in the first batch, by an error that names a remedy. Plans are made from times: where another one
cuts a script that reads values elsewhere, it may be refused too.

`test_architectures.py` beside them trains 38 architectures of `transformers`, tiny and random, with padded labels:
language models from GPT-2 to Mixtral and Mamba, encoders, sequence to sequence, images, CLIP, speech. Weights equal
the plain run's after three steps: in two stages with whole batches, in two stages by micro-batches (Mixtral and
Qwen2-MoE to 1e-4, as their router's loss is no mean over samples; not CLIP, which compares all samples of a batch,
and of which a warning tells), and as fused variants of two seeds. `fuzz.py` runs the scripts under options drawn by
chance, and tells of errors that are not refusals in words.
"""


class Claim(NamedTuple):
    feature: str
    group: str
    mode: str
    outcome: str
    test: str


class _Collector:
    """Notes the marks of collected tests."""

    def __init__(self) -> None:
        self.claims: list[Claim] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            for mark in item.iter_markers("feature"):
                case = getattr(item, "callspec", None)
                self.claims.append(_claim(mark, f"{item.path.stem}[{case.id if case else item.name}]"))


def _claim(mark: Any, test: str) -> Claim:
    (feature,) = mark.args
    claim = Claim(feature, mark.kwargs["group"], mark.kwargs["mode"], mark.kwargs.get("outcome", "works"), test)
    if claim.group not in GROUPS or claim.mode not in MODES or claim.outcome not in ("works", "refused"):
        raise ValueError(
            f"{test} is marked with {mark}: groups are {GROUPS}, modes {MODES}, outcomes works and refused"
        )
    return claim


def collected() -> list[Claim]:
    collector = _Collector()
    files = [str(file) for file in sorted(HERE.glob("test_pipedream_*.py"))]
    words = io.StringIO()
    with contextlib.redirect_stdout(words):
        code = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *files], plugins=[collector])
    if code:
        raise RuntimeError(words.getvalue())
    return collector.claims


def page(claims: list[Claim]) -> str:
    lines = [HEAD]
    for group in GROUPS:
        features = sorted({claim.feature for claim in claims if claim.group == group}, key=str.lower)
        if not features:
            continue
        lines += [f"## {group.capitalize()}\n", "| | synchronous | asynchronous | tests |", "|---|---|---|---|"]
        for feature in features:
            found = [claim for claim in claims if claim.feature == feature and claim.group == group]
            outcomes = [_outcome(found, mode) for mode in MODES]
            tests = ", ".join(f"`{test}`" for test in sorted({claim.test for claim in found}))
            lines.append(f"| {feature} | {' | '.join(outcomes)} | {tests} |")
        lines.append("")
    return "\n".join(lines)


def scripts() -> str:
    """The table of scripts that know nothing of pl-pipe."""
    import ast

    from ordinary.expected import BY_PLAN, CASES, IN_PARTS, LATE, NOT_CLAIMED, PARTS, REFUSED, RUNS

    titles = [case.title for case in CASES]
    lines = [SCRIPTS_HEAD, f"| script | what | {' | '.join(titles)} |", "|---" * (2 + len(titles)) + "|"]
    for path in sorted((HERE / "ordinary" / "scripts").glob("*.py")):
        what = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0].rstrip(".")
        outcomes = []
        for case in CASES:
            late = case.strategy in LATE
            refused, runs, unclaimed = (
                each.get(path.stem, {}).get(case.strategy) for each in (REFUSED, RUNS, NOT_CLAIMED)
            )
            if unclaimed or (case.strategy == PARTS and path.stem not in IN_PARTS):
                outcomes.append(f"not claimed{f': {unclaimed}' if unclaimed else ''}")
            elif refused:
                outcomes.append("refused, or runs, by its plan" if path.stem in BY_PLAN and late else "refused")
            elif late:
                outcomes.append("runs")
            else:
                outcomes.append("equal" if runs is None else f"runs: {runs}")
        lines.append(f"| `{path.stem}` | {what} | {' | '.join(outcomes)} |")
    return "\n".join([*lines, ""])


def _outcome(claims: list[Claim], mode: str) -> str:
    outcomes = {claim.outcome for claim in claims if claim.mode == mode}
    if len(outcomes) > 1:
        raise ValueError(f"{claims[0].feature}: one test says that it works, another that it is refused ({mode})")
    return outcomes.pop() if outcomes else "not tested"


def main() -> int:
    made = f"{page(collected())}\n{scripts()}"
    if "--check" in sys.argv[1:]:
        return int(not PAGE.is_file() or PAGE.read_text() != made)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
