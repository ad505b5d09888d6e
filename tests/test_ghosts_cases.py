"""Awkward steps over 2, 3 and 4 stages: equal to the plain run bit for bit, or refused with the reason."""

import subprocess
import sys
from functools import cache

import ghost_cases
import pytest
from ghost_cases import CASES, REFUSED, ROUNDED, owners, trial
from ghost_models import Outcome, assert_close, assert_equal, piped_run, single_run

from pl_pipe.errors import StageError
from tests.conftest import TIMEOUT_S

WORKING = [name for name in CASES if name not in REFUSED]
# Under autocast the single run casts a weight once and sums its gradients in bfloat16; where a weight travels, or is
# used on two stages, the sums are in float32 here, which is nearer to the truth but not equal.
AUTOCAST = ("straight", "skip", "set_items", "custom_function", "einsum_and_attention", "full_precision_inside")


@cache
def reference(name: str) -> Outcome:
    return single_run(trial(name))


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", WORKING)
def test_an_awkward_step_equals_the_single_run(name: str, stages: int) -> None:
    piped = piped_run(trial(name), owners(name, stages))
    if name in ROUNDED:
        assert_close(piped, reference(name))
    else:
        assert_equal(piped, reference(name))
    assert piped.transfers > 0


@pytest.mark.parametrize("name", AUTOCAST)
def test_mixed_precision(name: str) -> None:
    assert_equal(piped_run(trial(name, autocast=True), owners(name, 3)), single_run(trial(name, autocast=True)))


@pytest.mark.parametrize("stages", [3, 4])
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_work_is_refused(name: str, stages: int) -> None:
    """By every case's own reason, with the user's line."""
    with pytest.raises(StageError, match=REFUSED[name]) as caught:
        piped_run(trial(name), owners(name, stages), timeout_s=0.5)
    assert str(caught.value).startswith(f"{ghost_cases.__name__}.py:")


THREADS = """
import threading, torch
from torch._subclasses.fake_tensor import FakeTensorMode
import pl_pipe.tensors.ghosts.inference

def infer():
    for _ in range(300):
        with FakeTensorMode():
            torch.empty(3) + 1

def compute():
    for _ in range(300):
        torch.randn(4, requires_grad=True).mul(2).sum().backward()

threads = [threading.Thread(target=target) for target in (infer, infer, compute)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_may_infer_while_others_compute() -> None:
    """With a torch for CUDA on a machine without, the first fake mode of a process must not be a thread's."""
    subprocess.run([sys.executable, "-c", THREADS], check=True, timeout=TIMEOUT_S)
