"""docs/support.md says what the tests show."""

import subprocess
import sys

import pytest
from support_matrix import Claim, page

from tests.conftest import ROOT, TIMEOUT_S


def test_the_page_is_up_to_date() -> None:
    command = [sys.executable, "tests/support_matrix.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"docs/support.md is out of date; run make support-matrix\n{done.stderr}"


def test_a_feature_has_one_line_with_both_modes() -> None:
    claims = [
        Claim("b", "stopping", "synchronous", "works", "test_x.test_one"),
        Claim("b", "stopping", "synchronous", "works", "test_x.test_two"),
        Claim("b", "stopping", "asynchronous", "refused", "test_x.test_two"),
        Claim("A", "stopping", "asynchronous", "works", "test_x.test_one"),
    ]
    *_, first, second, end = page(claims).split("\n")
    assert first == "| A | not tested | works | `test_x.test_one` |"
    assert second == "| b | works | refused | `test_x.test_one`, `test_x.test_two` |"
    assert end == ""


def test_tests_that_contradict_each_other_are_found() -> None:
    works = Claim("b", "stopping", "synchronous", "works", "test_x.test_one")
    with pytest.raises(ValueError, match="b: one test says that it works, another that it is refused"):
        page([works, works._replace(outcome="refused")])
