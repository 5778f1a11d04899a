"""Pipelines from Python: a definition in TOML with its script, packed and applied."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from falaj.errors import Fault, InvalidInput, shorten
from falaj.governance.operations.operation import invalid
from falaj.records import durations
from falaj.records.control.pipelines import Pipeline, StoredPipeline
from falaj.records.durations import read_duration
from falaj.sdk.definition_files.toml_lines import TomlLines
from falaj.sdk.training import spec_for
from falaj.training.code_archive import pack_code

if TYPE_CHECKING:
    from falaj.sdk.platform import Platform

DURATIONS = ("window", "rest", "every", "approval_within", "longest", "timeout")
JOB = (
    "args",
    "framework",
    "nodes",
    "processes",
    "cpus",
    "gpus",
    "memory_bytes",
    "priority",
    "retries",
    "timeout",
    "env",
)
"""Fields of the job that may be given with those of the pipeline."""
FIELDS = {*Pipeline.model_fields, *JOB, "script"}


def apply_pipeline(
    platform: Platform, script: str | Path, *, workspace: str | None = None, **fields: Any
) -> StoredPipeline:
    """Pack `script` with the code in its folder, and apply the pipeline that trains with it.

    `fields` are those of Pipeline but `job`, and of the job: args, cpus, gpus, retries, timeout …
    """
    from falaj.sdk.platform import chunks

    packed = pack_code(script)
    options = {name: fields.pop(name) for name in JOB if name in fields}
    given = {"name": None, "args": (), "inputs": fields.pop("inputs", {})} | options
    job = spec_for(packed, **given)
    try:
        definition = Pipeline.model_validate({**fields, "job": job})
    except ValidationError as error:
        raise invalid("pipeline", error) from None
    code = platform.blobs.upload(chunks(packed.archive), workspace=workspace)
    return platform.pipelines.apply(definition, code=code.id, workspace=workspace)


def read_pipeline(path: Path) -> dict[str, Any]:
    """Return the fields in a TOML file, with `script` as a path, and durations parsed."""
    try:
        given = tomllib.loads(path.read_text())
    except OSError as error:
        allowed = f"a readable file of TOML ({error.strerror})"
        raise InvalidInput.at("FILE", given=str(path), allowed=allowed) from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidInput.at(str(path), given=str(error), allowed="a file of TOML in UTF-8") from None
    canary = given.get("canary")
    faults = _read_script(given, path) + _read_durations(given)
    faults += _read_durations(canary, "canary.") if isinstance(canary, dict) else []
    if faults:
        raise add_lines(InvalidInput("", faults=faults), path)
    return given


def add_lines(error: InvalidInput, path: Path) -> InvalidInput:
    """Return `error` with the line in `path` for each fault in a field of a pipeline."""
    lines, faults = TomlLines(path.read_text()), []
    for fault in error.faults:
        field = fault.where.removeprefix("definition.").removeprefix("job.")
        known = field.partition(".")[0] in FIELDS or fault.fix == "remove this field"
        at = f"{path}:{lines.line(tuple(field.split('.')))} {field}" if known else fault.where
        faults.append(fault.model_copy(update={"where": at}))
    count = f"{len(faults)} fault{'s' * (len(faults) != 1)}"
    return type(error)(f"{path}: {count} in the pipeline", faults=faults, details=error.details)


def _read_script(given: dict[str, Any], path: Path) -> list[Fault]:
    script = given.get("script")
    given["script"] = path.parent / str(script)
    if isinstance(script, str) and given["script"].is_file():
        return []
    allowed = "an existing Python script in the folder of this file"
    given_script = None if script is None else shorten(script)
    return [Fault(where="script", given=given_script, allowed=allowed, fix='script = "train.py"')]


def _read_durations(table: dict[str, Any], within: str = "") -> list[Fault]:
    faults = []
    for name in DURATIONS:
        if isinstance(text := table.get(name), str):
            table[name] = read_duration(text)
            if table[name] is None:
                fix = f'{name} = "90d"'
                faults.append(Fault(where=f"{within}{name}", given=text, allowed=durations.RULE, fix=fix))
    return faults
