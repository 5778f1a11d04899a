"""Read JSON that has one meaning: no duplicate keys, no NaN, no deep nesting."""

from __future__ import annotations

import json
from typing import Any, NoReturn


def parse_json(text: bytes) -> Any:
    """Parse UTF-8 JSON. Raise ValueError unless every reader would find the same in it."""
    try:
        return json.loads(
            text.decode("utf-8"), object_pairs_hook=unique_keys, parse_constant=_refuse_constant
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raise ValueError if a key is there twice: readers differ in which one they take."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key that is there twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name}, which is not JSON")
