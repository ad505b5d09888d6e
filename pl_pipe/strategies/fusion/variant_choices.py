"""Which hyper-parameters each variant has. lists of values, or a file -> *choices* -> a mapping for each."""

import csv
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pl_pipe.errors import ConfigError

GRID, ZIP = "grid", "zip"
Choice = dict[str, Any]
"""The hyper-parameters in which a variant differs from the model that was given, by name."""


def variant_choices(variants: Any, *, combine: str, trials: str | Path | None) -> list[Choice]:
    """One choice a variant; without any, a single one that changes nothing.

    `variants` is a list of choices, or a list of values for each name: all combinations of them (`grid`), or the first
    of each, the second of each, … (`zip`).
    """
    if combine not in (GRID, ZIP):
        raise ConfigError(f"strategy.combine={combine} is unknown; choose grid or zip")
    if trials is not None:
        if variants:
            raise ConfigError(f"both variants and trials={trials} are given; leave one out")
        return read_trials(Path(trials))
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


def read_trials(path: Path) -> list[Choice]:
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
        choices = variant_choices(found, combine=ZIP, trials=None)
    else:
        try:
            rows = [row for row in csv.reader(text.splitlines(), strict=True) if row]
        except csv.Error as error:
            raise ConfigError(
                f"trials={path} is no CSV ({error}); give names in the first line, then values"
            ) from error
        names = [name.strip() for name in rows[0]] if rows else []
        twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
        if twice is not None:
            raise ConfigError(f"trials={path} has two columns {twice!r}; leave one out")
        for number, row in enumerate(rows[1:], start=2):
            if len(row) != len(names):
                raise ConfigError(
                    f"trials={path} has {len(row)} values in line {number} for {len(names)} names; give one a name, "
                    "separated by commas (an empty one leaves the model's own)"
                )
        choices = [
            {name: _value(cell) for name, cell in zip(names, row, strict=True) if cell.strip()} for row in rows[1:]
        ]
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


def _value(text: str) -> Any:
    """A cell of a CSV file: a number where it is one."""
    found = yaml.safe_load(text)
    if isinstance(found, str):
        try:
            return float(found)  # YAML takes 1e-3 for text
        except ValueError:
            return found
    return found
