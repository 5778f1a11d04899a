"""Train from where the code is: pack it, upload it, submit the job."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from falaj.governance.operations import invalid
from falaj.records.training import Job, JobSpec
from falaj.training.packing import PackedCode, pack_code

if TYPE_CHECKING:
    from falaj.sdk.platform import Platform


def train(
    platform: Platform,
    script: str | Path,
    *,
    args: Sequence[str] = (),
    inputs: Mapping[str, str] | None = None,
    name: str | None = None,
    workspace: str | None = None,
    **options: Any,
) -> Job:
    """Submit `script` with the code around it as a job; `options` are fields of JobSpec."""
    packed = pack_code(script)
    spec = spec_for(packed, name=name, args=args, inputs=inputs or {}, **options)
    return submit(platform, spec, packed, workspace=workspace)


def spec_for(
    packed: PackedCode, *, name: str | None, args: Sequence[str], inputs: Mapping[str, str], **options: Any
) -> JobSpec:
    """The job that runs packed code; all that is wrong with it at once."""
    given = {
        "name": name or job_name(packed.script),
        "script": packed.script,
        "args": tuple(str(each) for each in args),
        "inputs": dict(inputs),
        "origin": packed.origin,
        **options,
    }
    try:
        return JobSpec.model_validate(given)
    except ValidationError as error:
        raise invalid("train", error) from None


def submit(platform: Platform, spec: JobSpec, packed: PackedCode, *, workspace: str | None = None) -> Job:
    """Upload packed code, and submit the job that runs it."""
    from falaj.sdk.platform import chunks

    code = platform.blob.upload(chunks(packed.archive), workspace=workspace)
    return platform.jobs.submit(spec, code=code.id, workspace=workspace)


def job_name(script: str) -> str:
    """What a job is called unless it is said: as its script, spelled as names are here."""
    return re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-")[:128] or "job"
