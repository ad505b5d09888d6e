"""Which hyper-parameters each variant has. lists of values, or a file -> *choices* -> a mapping for each."""

import csv
import io
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pl_pipe.errors import ConfigError

GRID, ZIP = "grid", "zip"
SEED = "seed"
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
Choice = dict[str, Any]
"""The hyper-parameters in which a variant differs from the model that was given, by name."""


def variant_choices(variants: Any, *, combine: str, trials: str | Path | None) -> list[Choice]:
    """One choice a variant; without any, a single one that changes nothing.

    `variants` is a list of choices, or a list of values for each name: all combinations of them (`grid`), or the first
    of each, the second of each, … (`zip`).
    """
    if combine not in (GRID, ZIP):
        raise ConfigError(f"combine={combine} is unknown; choose grid or zip")
    if trials is not None:
        if variants:
            raise ConfigError(f"both variants and trials={trials} are given; leave one out")
        return read_trials(Path(trials), combine)
    if variants is None:
        return [{}]
    if isinstance(variants, Mapping):
        return _combined(variants, combine) if variants else [{}]
    if isinstance(variants, str) or not isinstance(variants, Sequence):
        raise ConfigError(
            f"variants is {variants!r}; give a list of mappings, such as [{{'lr': 0.1}}, {{'lr': 0.03}}], or lists of "
            "values by name, such as {'lr': [0.1, 0.03]}"
        )
    choices = [dict(choice) if isinstance(choice, Mapping) else choice for choice in variants]
    for number, choice in enumerate(choices):
        if not isinstance(choice, dict):
            raise ConfigError(
                f"variants[{number}] is {choice!r}; give a mapping of hyper-parameters, such as {{'lr': 0.1}}"
            )
    if not choices:
        raise ConfigError("variants is an empty list; give at least one mapping, {} for the model as it is")
    return choices


def with_seeds(choices: Sequence[Choice], seeds: Sequence[int] | None) -> list[Choice]:
    """As tables show them: two variants may differ in nothing else."""
    if seeds is None:
        return list(choices)
    return [{**choice, SEED: choice.get(SEED, seed)} for choice, seed in zip(choices, seeds, strict=True)]


def read_trials(path: Path, combine: str = GRID) -> list[Choice]:
    """A CSV file has names in its first line and a variant in each other; a JSON file is what `variants` may be.

    What an empty cell would name, the variant has as the model has it.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets begin files with a sign for it
    except OSError as error:
        raise ConfigError(f"trials={path} cannot be read ({error.strerror}); give a CSV or JSON file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"trials={path} is no text ({error.reason}); give a CSV or JSON file") from error
    if path.suffix.lower() == ".json":
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"trials={path} is no JSON ({error}); give a list of {{name: value}}") from error
        choices = variant_choices(found, combine=combine, trials=None)
    else:
        choices = _rows(path, text)
    if choices in ([], [{}]):
        raise ConfigError(f"trials={path} holds no variant; give one a line, below a line of names")
    return choices


def _combined(values: Mapping[str, Any], combine: str) -> list[Choice]:
    lists = {
        name: list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        for name, value in values.items()
    }
    for name, of_name in lists.items():
        if not of_name:
            raise ConfigError(f"variants.{name} is an empty list; give at least one value")
    if combine == GRID:
        return [dict(zip(lists, of_one, strict=True)) for of_one in itertools.product(*lists.values())]
    length = max(map(len, lists.values()))
    odd = {name: len(of_name) for name, of_name in lists.items() if len(of_name) not in (1, length)}
    if odd:
        found = ", ".join(f"{name} has {count}" for name, count in odd.items())
        raise ConfigError(
            f"combine=zip takes lists of one length, the longest has {length} values but {found}; make them equally "
            "long, or set combine=grid"
        )
    return [{name: of_name[min(n, len(of_name) - 1)] for name, of_name in lists.items()} for n in range(length)]


def _rows(path: Path, text: str) -> list[Choice]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        rows = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row) or len(row) > 1]
    except csv.Error as error:
        raise ConfigError(f"trials={path} is no CSV ({error}); give names in the first line, then values") from error
    names = [name.strip() for name in rows[0][1]] if rows else []
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise ConfigError(f"trials={path} has two columns {twice!r}; leave one out")
    choices = []
    for line, row in rows[1:]:
        if len(row) != len(names):
            raise ConfigError(
                f"trials={path} has {len(row)} values in line {line} for {len(names)} names; give one a name, "
                "separated by commas (an empty one leaves the model's own)"
            )
        try:
            choices.append({name: _value(cell) for name, cell in zip(names, row, strict=True) if cell.strip()})
        except ValueError as error:
            raise ConfigError(
                f"trials={path} has a list or mapping in line {line} that is no JSON ({error}); write it as [1, 2] or "
                '{"name": 1}, in quotes'
            ) from error
    return choices


def _value(text: str) -> Any:
    """A cell of a CSV file: a number, true, false, null or a JSON list or mapping where it is one, else a text."""
    found = text.strip()
    if found.lower() in _CONSTANTS:
        return _CONSTANTS[found.lower()]
    if found[0] in "[{":
        return json.loads(found)
    for kind in (int, float):
        try:
            return kind(found)
        except ValueError:
            continue
    return found
