"""Reading the JSON files that one command leaves for another: profiles, plans, clusters."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pl_pipe.errors import PlPipeError


def read_json(path: Path, *, name: str, error: type[PlPipeError], remedy: str) -> Any:
    """The file's content; `name` is what the user calls the file, such as its setting."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as problem:
        raise error(f"{name} cannot be read: {problem}; {remedy}") from problem


def check_schema(
    content: Any, schema: int, *, source: str, what: str, error: type[PlPipeError], remedy: str
) -> Mapping[str, Any]:
    """The content, if it is a mapping of the schema that is understood."""
    found = content.get("schema") if isinstance(content, Mapping) else type(content).__name__
    if not isinstance(content, Mapping) or found != schema:
        raise error(f"{source} is not a {what} of schema {schema} (schema: {found}); {remedy}")
    return content
