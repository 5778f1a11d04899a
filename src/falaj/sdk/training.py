"""Training from Python: pack the code, upload it, and submit the job."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from falaj.errors import Fault
from falaj.records.training.jobs import Job, JobSpec
from falaj.sdk.job_request import JobRequest, build_spec, parse_job_request
from falaj.training.code_archive import PackedCode, pack_code

if TYPE_CHECKING:
    from falaj.sdk.platform import Platform


class PreparedJob(NamedTuple):
    """A job that is ready to submit."""

    spec: JobSpec
    packed: PackedCode
    script: Path
    workspace: str | None


def train(
    platform: Platform,
    script: str | Path | None = None,
    *,
    file: str | Path | None = None,
    estimate: bool = False,
    **options: Any,
) -> Job:
    """Submit `script` with the code in its folder as a job, or the job in a YAML `file`.

    `options` are those of `falaj train`, and the fields of JobSpec; they win over the file. With `estimate` the script
    is run here first, up to its `fj.fit`, and refused if no machine of the platform could hold its training.
    """
    form = parse_job_request({k: v for k, v in options.items() if v is not None}, place=".".join)
    ready = prepare(form, script=script, file=file)
    ready = add_estimate(ready) if estimate else ready
    return submit(platform, ready.spec, ready.packed, workspace=ready.workspace)


def prepare(
    form: JobRequest, *, script: str | Path | None = None, file: str | Path | None = None
) -> PreparedJob:
    """Return the job that `form` requests, merged over a `file`, with its code packed; report all faults at once."""
    if file is not None:
        from falaj.sdk.definition_files.job_yaml import read_job

        form = form.over(read_job(file, needs_script=script is None))
    chosen = script or form.values.get("script")
    if chosen is None and ("script",) not in form.places:
        fix = "falaj train SCRIPT" if file is None else "script: train.py"
        where = "SCRIPT" if file is None else f"{file} script"
        form = replace(form, faults=(Fault(where=where, allowed="a Python script", fix=fix), *form.faults))
    if script is not None and not os.path.isfile(script):
        fault = Fault(
            where="script",
            given=str(script),
            allowed="a Python script that is there",
            fix="falaj train path/to/train.py",
        )
        form = replace(form, faults=(fault, *form.faults))
    fixed = {"name": job_name(str(chosen)), "script": "script.py"}
    build_spec(form, **fixed)  # what is wrong is said before anything is packed
    assert chosen is not None  # noqa: S101 - or it was refused
    packed = pack_code(chosen)
    spec = build_spec(form, **fixed | {"script": packed.script, "origin": packed.origin})
    return PreparedJob(spec, packed, Path(chosen), form.values.get("workspace"))


def add_estimate(ready: PreparedJob) -> PreparedJob:
    """Return the job with an estimate of its memory; raise InvalidInput where its script gives none."""
    from falaj.sdk.estimation import estimate_script

    found = estimate_script(ready.script, ready.spec)
    return ready._replace(spec=ready.spec.model_copy(update={"estimate": found}))


def spec_for(
    packed: PackedCode, *, name: str | None, args: Sequence[str], inputs: Mapping[str, str], **options: Any
) -> JobSpec:
    """Return the job that runs packed code; raise InvalidInput with all faults."""
    named = {} if name is None else {"name": name}
    form = parse_job_request({"args": args, "inputs": inputs, **named, **options}, place=".".join)
    return build_spec(form, name=job_name(packed.script), script=packed.script, origin=packed.origin)


def submit(platform: Platform, spec: JobSpec, packed: PackedCode, *, workspace: str | None = None) -> Job:
    """Upload packed code, and submit the job that runs it."""
    from falaj.sdk.platform import chunks

    code = platform.blobs.upload(chunks(packed.archive), workspace=workspace)
    return platform.jobs.submit(spec, code=code.id, workspace=workspace)


def job_name(script: str) -> str:
    """Return the default name of a job: that of its script, as a valid name."""
    return re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-")[:128].strip("-") or "job"
