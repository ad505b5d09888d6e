"""Recurrent networks: one call of torch's kernel a variant. It walks through time, so there is little to share."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pl_pipe.fusion.context import Context
from pl_pipe.fusion.formulations import BRANCHES


def _recurrent(function: Callable[..., Any], context: Context, *args: Any, **kwargs: Any) -> Any:
    context.report.note(function.__name__, BRANCHES)
    return context.per_variant(function, args, kwargs, name=function.__name__)


RULES: dict[Any, Callable[..., Any]] = {
    function: partial(_recurrent, function)
    for function in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu, torch.lstm_cell, torch.gru_cell)
}
