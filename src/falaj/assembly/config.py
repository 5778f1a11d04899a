"""Read falaj.toml; every fault names its line and field."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from pathlib import Path

from pydantic import ValidationError

from falaj.errors import ConfigInvalid, Fault, shorten
from falaj.records.config import Config

SECRETS = {"url", "pin", "access_key", "secret_key", "token", "headers"}


def read_config(path: Path) -> Config:
    """Return the configuration in `path`, or the defaults if there is no file. Raise ConfigInvalid with all faults."""
    if not path.exists():
        return Config()
    try:
        text = path.read_text()
        return Config.model_validate(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigInvalid(
            f"{path} is not TOML in UTF-8", faults=[Fault(where=str(path), allowed=str(error))]
        ) from None
    except ValidationError as error:
        faults = [
            Fault(
                where=f"{path}:{_line(text, fault['loc'])} {'.'.join(str(part) for part in fault['loc'])}",
                given=_given(fault["loc"], fault["input"]) if fault["type"] != "missing" else None,
                allowed=fault["msg"].removeprefix("Value error, "),
                fix="remove this line" if fault["type"] == "extra_forbidden" else None,
            )
            for fault in error.errors(include_url=False, include_context=False)
        ]
        raise ConfigInvalid(f"{path} has {len(faults)} faults", faults=faults) from None


def _given(location: tuple[int | str, ...], value: object) -> str:
    """Return the value in the file, unless it may be a secret."""
    return "(not shown: it may be a secret)" if SECRETS & {str(part) for part in location} else shorten(value)


def reveal(secret: str, *, field: str) -> str:
    """Return the secret that env:NAME or file:PATH names."""
    kind, _, where = secret.partition(":")
    if kind == "env":
        value = os.environ.get(where)
        if not value:
            raise ConfigInvalid.at(field, given=secret, allowed=f"the environment variable {where}, set")
        return value
    path = Path(where)
    try:
        mode = path.stat().st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigInvalid.at(
                field,
                given=f"{where} with mode {stat.filemode(mode)}",
                allowed="0600",
                fix=f"chmod 600 {where}",
            )
        return path.read_text().strip()
    except OSError as error:
        raise ConfigInvalid.at(field, given=secret, allowed=f"a readable file ({error.strerror})") from None


def _line(text: str, location: tuple[int | str, ...]) -> int:
    """Return the line of a field in a TOML document, or the line on which its table begins."""
    keys = [str(part) for part in location if isinstance(part, str)]
    best = 1
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[+\s*([^\]]+?)\s*\]+", line)
        if header and header[1].split(".") == keys[: len(header[1].split("."))]:
            best = number
        entry = re.match(r"\s*([\w.\"-]+)\s*=", line)
        if entry and keys and entry[1].strip('"').split(".")[-1] == keys[-1]:
            return number
    return best
