"""Pipelines from where the code is: a definition in TOML beside its script, packed and applied in one go."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from falaj.errors import InvalidInput
from falaj.governance.operations import invalid
from falaj.records import durations
from falaj.records.durations import read_duration
from falaj.records.pipelines import Pipeline, StoredPipeline
from falaj.sdk.training import spec_for
from falaj.training.packing import pack_code

if TYPE_CHECKING:
    from falaj.sdk.platform import Platform

DURATIONS = ("window", "rest", "every", "approval_within", "longest", "timeout")
JOB = (
    "args",
    "framework",
    "processes",
    "cpus",
    "gpus",
    "memory_bytes",
    "priority",
    "retries",
    "timeout",
    "env",
)
"""Fields of the job that may stand beside those of the pipeline."""


def apply_pipeline(
    platform: Platform, script: str | Path, *, workspace: str | None = None, **fields: Any
) -> StoredPipeline:
    """Pack `script` with the code around it, and apply the pipeline that trains by it.

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
    code = platform.blob.upload(chunks(packed.archive), workspace=workspace)
    return platform.pipelines.apply(definition, code=code.id, workspace=workspace)


def read_pipeline(path: Path) -> dict[str, Any]:
    """The fields in a TOML file, with `script` as a path and durations like 90d as such."""
    try:
        given = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidInput.at(str(path), given=str(error), allowed="a file of TOML in UTF-8") from None
    if not isinstance(given.get("script"), str):
        raise InvalidInput.at(f"{path} script", given=given.get("script"), allowed='script = "train.py"')
    given["script"] = path.parent / given["script"]
    for table in (given, given.get("canary")):
        if isinstance(table, dict):
            _read_durations(table, path)
    return given


def _read_durations(table: dict[str, Any], path: Path) -> None:
    for name in DURATIONS:
        if isinstance(text := table.get(name), str):
            table[name] = read_duration(text)
            if table[name] is None:
                fix = f'{name} = "90d"'
                raise InvalidInput.at(f"{path} {name}", given=text, allowed=durations.RULE, fix=fix)
