"""Reads the definitions of entities and views in TOML, or in Python that runs here and never on the platform.

    features.toml   [[entity]] and [[view]] tables; durations as "7d"; `source` names the file with a view's rows
    features.py     fj.Entity and fj.FeatureView at the top level of the module, alone or in tuples and lists

All faults of all files are collected before anything fails.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from falaj.errors import FalajError, Fault, InvalidInput, shorten
from falaj.records.features import Entity, FeatureView
from falaj.sdk.definition_files.features_toml import read_toml

NAMES = ("features.toml", "features.py", "definitions.py")
"""The files that are read in a folder. Other Python files may have side effects and are run only when named."""


@dataclass
class Definitions:
    """The definitions in files. `sources` are the files with the rows of views."""

    entities: list[Entity] = field(default_factory=list)
    views: list[FeatureView] = field(default_factory=list)
    sources: dict[str, Path] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)


def read_definitions(path: Path) -> Definitions:
    """Return the definitions in the file or folder `path`; raise InvalidInput with every fault."""
    found, faults = Definitions(files=_files(path)), list[Fault]()
    places: dict[tuple[str, str], str] = {}
    for file in found.files:
        read = read_toml if file.suffix == ".toml" else _read_python
        for record, where, source in read(file, faults):
            _take(found, record, where, places, faults)
            if source is not None:
                found.sources[record.name] = source
    if not faults and not found.entities and not found.views:
        shown = ", ".join(str(file) for file in found.files)
        faults.append(Fault(where=shown, given="no definition", allowed="entities and views"))
    if faults:
        raise InvalidInput(_summary(found.files, faults), faults=faults)
    return found


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = [path / name for name in NAMES if (path / name).is_file()]
        if not files:
            raise InvalidInput.at(
                "PATH", given=str(path), allowed=f"a folder with {' or '.join(NAMES)}", fix="falaj apply FILE"
            )
        return files
    if not path.is_file() or path.suffix not in (".toml", ".py"):
        raise InvalidInput.at(
            "PATH", given=str(path), allowed="a TOML or Python file that is there, or a folder"
        )
    return [path]


def _take(
    found: Definitions,
    record: Entity | FeatureView,
    where: str,
    places: dict[tuple[str, str], str],
    faults: list[Fault],
) -> None:
    """Add `record`; a name that is defined twice must have the same definition."""
    same: list[Any] = found.entities if isinstance(record, Entity) else found.views
    kind = "entity" if isinstance(record, Entity) else "view"
    before = next((each for each in same if each.name == record.name), None)
    if before is None:
        places[kind, record.name] = where
        same.append(record)
    elif before != record or not where.endswith(".py"):
        faults.append(
            Fault(
                where=where,
                given=f"{kind} {record.name} again",
                allowed=f"one definition of a name; the first is {places[kind, record.name]}",
            )
        )


def _read_python(path: Path, faults: list[Fault]) -> Iterator[tuple[Entity | FeatureView, str, None]]:
    """Yield the records in a module after running it."""
    module = ModuleType("falaj_definitions")
    module.__file__ = str(path)
    folder = str(path.parent.absolute())
    sys.path.insert(0, folder)
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))  # noqa: S102 - the user's own file, run for the user
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        faults += _python_faults(path, error)
        return
    finally:
        sys.path.remove(folder)
    for value in vars(module).values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, Entity | FeatureView):
                yield each, str(path), None


def _python_faults(path: Path, error: BaseException) -> list[Fault]:
    if isinstance(error, SyntaxError):
        text = f": {error.text.strip()}" if error.text else ""
        given = f"{error.msg}{text}"
        return [Fault(where=f"{error.filename or path}:{error.lineno}", given=given, allowed="Python")]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    where = f"{path}:{frames[-1].lineno}" if frames else str(path)
    if isinstance(error, ValidationError):
        return [
            Fault(
                where=f"{where} {error.title} {'.'.join(str(part) for part in fault['loc'])}".rstrip(),
                given=None if fault["type"] == "missing" else shorten(fault["input"]),
                allowed=fault["msg"].removeprefix("Value error, "),
            )
            for fault in error.errors(include_url=False, include_context=False)
        ]
    words = error.message if isinstance(error, FalajError) else shorten(str(error), limit=200)
    return [Fault(where=where, given=f"{type(error).__name__}: {words}", allowed="a module that runs")]


def _summary(files: list[Path], faults: list[Fault]) -> str:
    what = str(files[0]) if len(files) == 1 else f"{len(files)} files"
    return f"{what}: {len(faults)} fault{'s' * (len(faults) != 1)} in the definitions"
