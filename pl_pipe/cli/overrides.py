"""Hydra's override tokens as text: quoting values, and telling overrides from flags."""

import re
from collections.abc import Iterable

from pl_pipe.errors import ConfigError

_GROUPS = ("recipe", "data", "strategy", "trainer", "cluster", "hetero", "policy", "logger", "callbacks", "evaluation")
_FREE = "strategy.variants."
_VALUE_FLAGS = ("--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp")


def quoted(key: str, value: object) -> str:
    """`key='value'` as Hydra's grammar wants it: quotes are escaped, and backslashes only where a quote follows."""
    text = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), str(value))
    return f"{key}='{text}'"


def override_key(token: str) -> str | None:
    """What a token overrides, or None for a flag or a flag's value."""
    if token.startswith("-") or "=" not in token:
        return None
    return token.split("=", 1)[0].lstrip("+")


def without_outdated(recorded: Iterable[str], given: Iterable[str]) -> list[str]:
    """The recorded tokens that still mean something: `strategy=single` leaves none of another strategy's settings.

    The same choice again keeps them.
    """
    now = {key: token.split("=", 1)[1] for token in given if (key := override_key(token)) in _GROUPS}
    kept = list(recorded)
    before = {key: token.split("=", 1)[1] for token in kept if (key := override_key(token)) in _GROUPS}
    changed = {key for key, choice in now.items() if before.get(key) != choice}
    return [token for token in kept if (override_key(token) or "").split(".", 1)[0] not in changed]


def with_free_names(arguments: Iterable[str]) -> list[str]:
    """`strategy.variants.lr=[…]` names what the model has; Hydra wants a sign before names unknown to it."""
    return [f"++{token}" if token.startswith(_FREE) and "=" in token else token for token in arguments]


def refuse_null_choices(arguments: Iterable[str]) -> None:
    """Hydra has no word for an empty choice; groups that may be empty have an option called none."""
    for token in arguments:
        found = re.fullmatch(rf"({'|'.join(_GROUPS)})=(null|)", token)
        if found:
            empty = found[1] in ("hetero", "policy", "logger", "callbacks", "evaluation")
            remedy = f"{found[1]}=none is the empty choice" if empty else f"name an option, or leave {found[1]} out"
            raise ConfigError(f"{token} chooses nothing; {remedy}")


def config_flags(arguments: list[str]) -> list[str]:
    """The flags that say where configuration is found; Hydra does not count them among a job's overrides."""
    found = []
    for position, token in enumerate(arguments):
        if token.split("=", 1)[0] in _VALUE_FLAGS:
            found.append(token)
            if "=" not in token and position + 1 < len(arguments):
                found.append(arguments[position + 1])
    return found
