"""Ranks agree on a value, or say who differs."""

import numpy
import torch
from pipedream_farm import Farm, Order

from pl_pipe.comm.consensus import Votes, digest

pytest_plugins = "pipedream_plugin"

AGREEING = Order("adaptive_tasks.agree", ranks=3, values=[["ring", 2], ["ring", 2], ["ring", 2]])
DIFFERING = Order("adaptive_tasks.agree", ranks=3, values=["ring", "star", "ring"])


def test_those_that_differ_are_the_few() -> None:
    one, two, three = b"one", b"two", b"three"
    assert Votes((one, one, one)).agreed
    assert Votes((one, two, one, one)).differing == (1,)
    assert Votes((two, one, one)).differing == (0,)
    assert Votes((one, two)).differing == (1,), "the lowest rank's word counts where both are as frequent"
    assert Votes((one, two, three)).differing == (1, 2)


def test_digests_tell_values_apart() -> None:
    values = [
        1, 1.0, "1", [1], [[1]], [1, 1], {"a": 1}, {"a": 2}, {"b": 1}, None, True,
        torch.ones(2), torch.ones(2, 1), torch.ones(2, dtype=torch.float64), torch.tensor([1.0, 1.0 + 2**-23]),
        torch.zeros(1), -torch.zeros(1), torch.zeros(0), torch.ones(2, dtype=torch.bfloat16),
        {"a": {"b": 1}, "c": 2}, {"a": {"b": 1, "c": 2}}, {1, 2}, {1}, numpy.ones(2), numpy.ones(2, numpy.float32),
        numpy.arange(5000), numpy.where(numpy.arange(5000) == 2500, 0, numpy.arange(5000)), numpy.array([None, 1]),
    ]  # fmt: skip
    digests = [digest(value) for value in values]
    assert len(set(digests)) == len(values)
    assert digest({"w": torch.ones(2, 2).t()}) == digest({"w": torch.ones(2, 2)})
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest({str(number) for number in range(50)}) == digest({str(49 - number) for number in range(50)})


def test_equal_values_are_agreed_on(farm: Farm) -> None:
    assert [result["agreed"] for result in farm.start(AGREEING).outcome] == [True] * 3


def test_all_ranks_learn_who_differs(farm: Farm) -> None:
    for error in farm.start(DIFFERING).errors:
        assert error == (
            "ConsensusError: the ranks disagree on the topology: rank 0 has 'ring', rank 1 has 'star'; give all ranks "
            "the same"
        )
