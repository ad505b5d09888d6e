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


def _outcome(claims: list[Claim], mode: str) -> str:
    outcomes = {claim.outcome for claim in claims if claim.mode == mode}
    if len(outcomes) > 1:
        raise ValueError(f"{claims[0].feature}: one test says that it works, another that it is refused ({mode})")
    return outcomes.pop() if outcomes else "not tested"


def main() -> int:
    made = page(collected())
    if "--check" in sys.argv[1:]:
        return int(not PAGE.is_file() or PAGE.read_text() != made)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
