"""The fields of a job as users write them, and how each becomes one of JobSpec."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

from falaj.records import durations, sizes
from falaj.records.durations import read_duration
from falaj.records.scheduling.snapshot import PRIORITIES, WHOLE_GPU, Affinity
from falaj.records.sizes import read_size
from falaj.records.training.jobs import JobSpec

Path = tuple[str, ...]

ALIASES = {
    "dataset": "inputs",
    "gpu_model": "gpu_models",
    "label": "labels",
    "pool": "pools",
    "preempt": "preemptible",
    "secret": "secrets",
    "volume": "volumes",
}
"""Singular names of fields that take several values."""

MERGED = ("inputs", "env", "secrets")
"""Fields to which an option adds values instead of replacing them."""

SYNONYMS = {
    "memory": "memory_bytes",
    "disk": "disk_bytes",
    "gpu_memory": "gpu_memory_bytes",
    "gpu_share": "gpu_milli",
}
"""Two names of one field: for users, and in JobSpec."""

GPU_FIELDS = ("gpu_share", "gpu_milli", "gpu_memory", "gpu_memory_bytes", "gpu_models", "gpu_profile")
"""Fields that imply a GPU, whether or not a number of GPUs is given."""

FLAGS = ("preemptible", "network", "nsys", "spread")


class FieldFormatError(Exception):
    """Raised for a value that does not follow the rule of its field."""

    def __init__(self, allowed: str, example: str) -> None:
        super().__init__(allowed)
        self.allowed, self.example = allowed, example


class JobField(NamedTuple):
    """The field of JobSpec that a value sets, and how the value is parsed."""

    path: Path
    read: Callable[[Any], Any]


def _as_is(value: Any) -> Any:
    return value


def _length_of_time(value: Any) -> Any:
    if isinstance(value, timedelta):
        return value
    found = read_duration(value)
    if found is None and not (isinstance(value, str) and value.upper().startswith("P")):  # ISO 8601
        raise FieldFormatError(durations.RULE, "10m")
    return value if found is None else found


def _size(value: Any) -> int:
    found = read_size(value)
    if found is None:
        raise FieldFormatError(sizes.RULE, "8GiB")
    return found


def _share(value: Any) -> int:
    """Return thousandths of a GPU, from 0.25 or 25%."""
    found = re.fullmatch(r"(\d{1,3}(?:\.\d{1,9})?|\.\d{1,9}) ?(%?)", str(value).strip(), re.ASCII)
    part = Fraction(found[1]) / (100 if found[2] else 1) if found else Fraction(0)
    milli = round(part * WHOLE_GPU)
    if not 0 < part <= 1 or not milli:
        raise FieldFormatError(
            "a part of one GPU, above 0 and up to 1, or in percent, to a thousandth", "0.25"
        )
    return milli


def _priority(value: Any) -> Any:
    """Return the number of a priority class, or the number itself."""
    if not isinstance(value, str) or re.fullmatch(r"[+-]?\d+", value.strip(), re.ASCII):
        return value
    if value not in PRIORITIES:
        raise FieldFormatError(f"{', '.join(PRIORITIES)}, or a whole number", "high")
    return PRIORITIES[value]


def _processes(value: Any) -> Any:
    """Return the number of processes; for an elastic job the minimum and the maximum."""
    if not isinstance(value, str) or ":" not in value:
        return value
    few, _, most = value.partition(":")
    if not (few.isdecimal() and most.isdecimal() and 1 <= int(few) <= int(most)):
        raise FieldFormatError("a count, or the fewest and the most, like 2:4", "2:4")
    return int(few), int(most)


def _roles(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    pairs = [each.partition("=") for each in value.split(",")]
    if not all(name and count.isdecimal() for name, _, count in pairs) or len({p[0] for p in pairs}) < len(
        pairs
    ):
        raise FieldFormatError(
            "roles, each once, and how many processes each has, like worker=2,ps=1", "worker=2,ps=1"
        )
    return {name: int(count) for name, _, count in pairs}


def _several(value: Any) -> Any:
    """Return one or several values, given with commas or as a list."""
    if isinstance(value, str):
        return [each for each in value.split(",") if each]
    if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return [each for part in value for each in part.split(",") if each]
    return value


def _named(value: Any, *, form: str, read: Callable[[str], tuple[str, str]] | None = None) -> Any:
    """Return a mapping, given as such or as pairs in the named form."""
    if isinstance(value, Mapping):
        return dict(value)
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(each, str) for each in items):
        raise FieldFormatError(f"names and values, each {form}", form)
    pairs = [(read or _pair)(each) for each in items]
    if not all(name for name, _ in pairs):
        raise FieldFormatError(form, form)
    return dict(pairs)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    return (name, value) if equals else ("", "")


def _input(text: str) -> tuple[str, str]:
    """Return (name, reference) of NAME=REFERENCE; a reference alone is also the name."""
    if "=" in text:
        return _pair(text)
    return text.rpartition("/")[2].rpartition(":")[2].partition("@")[0], text


def _words(value: Any) -> Any:
    if not isinstance(value, list | tuple) or any(isinstance(each, list | Mapping | None) for each in value):
        raise FieldFormatError("a list of words", '["--epochs", "3"]')
    return tuple(str(each) for each in value)


_SPELLED: dict[str, Callable[[Any], Any]] = {
    "args": _words,
    "env": partial(_named, form="K=V"),
    "gpu_models": _several,
    "hang_after": _length_of_time,
    "inputs": partial(_named, form="NAME=REF", read=_input),
    "priority": _priority,
    "processes": _processes,
    "roles": _roles,
    "secrets": partial(_named, form="VARIABLE=NAME"),
    "timeout": _length_of_time,
    "volumes": _several,
}
_HIDDEN = {"affinity", "asked", "estimate", "module", "origin", "script"}
_OF_AFFINITY = {
    name: JobField(("affinity", name), _as_is if name in ("spread", "island") else _several)
    for name in Affinity.model_fields
}

FIELDS: dict[str, JobField] = {
    **{n: JobField((n,), _SPELLED.get(n, _as_is)) for n in JobSpec.model_fields if n not in _HIDDEN},
    **_OF_AFFINITY,
    "memory": JobField(("memory_bytes",), _size),
    "disk": JobField(("disk_bytes",), _size),
    "gpu_memory": JobField(("gpu_memory_bytes",), _size),
    "gpu_share": JobField(("gpu_milli",), _share),
}
"""Every field by the name that users write; `script` and `workspace` are separate."""
