"""Rules for operations of several variants at once, one file a family: function -> what computes it for arrays."""

from collections.abc import Callable
from functools import partial
from typing import Any

from pl_pipe.fusion.context import Context
from pl_pipe.fusion.rules import (
    activation,
    attention,
    convolution,
    dropout,
    embedding,
    linear,
    losses,
    normalization,
    recurrent,
)
from pl_pipe.tensors.arrays import Rule

_FAMILIES = (activation, attention, convolution, dropout, embedding, linear, losses, normalization, recurrent)


def rules_for(context: Context) -> dict[Any, Rule]:
    """Every function that has a rule, bound to the array."""
    bound: dict[Any, Rule] = {}
    for family in _FAMILIES:
        rules: dict[Any, Callable[..., Any]] = family.RULES
        bound.update({function: partial(rule, context) for function, rule in rules.items()})
    return bound
