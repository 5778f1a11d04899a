"""Fits keys, names and texts of another tracker into what tracking takes, without losing or mixing any."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pydantic import TypeAdapter, ValidationError

from falaj.records.tracking import VALUE_LENGTH, ExperimentName, Key, RunName, UserName
from falaj.sdk.run_import.source import SourceFile

LONG_VALUES = "falaj-import/long-values.json"
"""The artifact that has the texts that are too long for a parameter or a tag, whole."""
CUT = f" … (cut; whole in the artifact {LONG_VALUES})"
KEY_LENGTH, NAME_LENGTH, USER_LENGTH = 250, 500, 256

_key, _run_name = TypeAdapter(Key), TypeAdapter(RunName)
_experiment_name, _user = TypeAdapter(ExperimentName), TypeAdapter(UserName)
_FOREIGN = re.compile(r"[^A-Za-z0-9_./ :-]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass
class FittedValues:
    """Parameters or tags as they are stored; `long` are those that are cut, whole."""

    values: dict[str, str] = field(default_factory=dict)
    long: dict[str, str] = field(default_factory=dict)


def fit_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return a valid key for each; two keys never become one, and a valid one stays as it is."""
    given = list(dict.fromkeys(keys))
    fitted = {key: key for key in given if _fits(_key, key)}
    taken = set(fitted)
    for key in given:
        if key in fitted:
            continue
        new = _FOREIGN.sub("_", key)[:KEY_LENGTH] or "_"
        if new in taken:
            digest = hashlib.sha256(key.encode(errors="replace")).hexdigest()[:8]
            new = f"{new[: KEY_LENGTH - 9]}-{digest}"
        taken.add(new)
        fitted[key] = new
    return fitted


def fit_values(given: Mapping[str, str]) -> FittedValues:
    """Return parameters or tags whose keys and values are valid."""
    names, found = fit_keys(given), FittedValues()
    for key, value in given.items():
        text = fit_text(value)
        if len(text) > VALUE_LENGTH:
            found.long[names[key]] = text
            text = text[: VALUE_LENGTH - len(CUT)] + CUT
        found.values[names[key]] = text
    return found


def fit_text(text: str) -> str:
    """Return a text without what is no character: NUL, and halves of surrogate pairs."""
    return text.replace("\x00", "�").encode("utf-8", "replace").decode()


def long_values(**groups: FittedValues) -> SourceFile | None:
    """Return the file with the long texts of `params` and `tags`, or None if there are none."""
    whole = {name: dict(sorted(group.long.items())) for name, group in groups.items() if group.long}
    if not whole:
        return None
    text = json.dumps(whole, ensure_ascii=False, sort_keys=True).encode()
    return SourceFile(LONG_VALUES, len(text), text)


def fit_experiment_name(name: str, *, otherwise: str) -> str:
    return _fit_line(_experiment_name, name, NAME_LENGTH, otherwise)


def fit_run_name(name: str, *, otherwise: str) -> str:
    return _fit_line(_run_name, name, NAME_LENGTH, otherwise)


def fit_user(name: str) -> str | None:
    return _fit_line(_user, name, USER_LENGTH, "") or None


def _fit_line(rule: TypeAdapter[str], text: str, limit: int, otherwise: str) -> str:
    if _fits(rule, text):
        return text
    fitted = _CONTROL.sub("_", fit_text(text)).strip()[:limit].strip()
    return fitted if _fits(rule, fitted) else otherwise


def _fits(rule: TypeAdapter[str], text: str) -> bool:
    try:
        rule.validate_python(text)
    except (ValidationError, ValueError):
        return False
    return True
