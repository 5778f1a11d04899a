"""Starts the tracked run of a job: its parameters and tags, and the run that it continues."""

from __future__ import annotations

from collections.abc import Mapping

from falaj.governance import objects
from falaj.governance.operations.call import Call
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ObjectId
from falaj.records.training.jobs import JobSpec
from falaj.training.dependencies import TrackedRuns
from falaj.training.runtime.agent.agents import RESUME_PREFIX

LONGEST_COMMAND = 6000
IMAGE_TAG = "falaj.image"
"""The tag with the digest of the image that the newest attempt ran in, on a cluster."""
CONTINUES_RUN = "job.goes_on_from"
"""The parameter that names the previous run of the same job; this run inherits its resume history."""


def start_run(
    runs: TrackedRuns,
    call: Call,
    home: StoredObject,
    job: ObjectId,
    spec: JobSpec,
    inputs: Mapping[str, ObjectId],
    *,
    after: ObjectId | None = None,
) -> ObjectId:
    """Start a run of a job. One that comes `after` another resumes from the same checkpoints: it inherits the resume
    history of the other, and has the other among its sources."""
    params = params_of(spec, inputs)
    if after is not None:
        before = runs.params(call.tx, after)
        params |= {key: value for key, value in before.items() if key.startswith(RESUME_PREFIX)}
        params[CONTINUES_RUN] = after
        call.referred["before"] = [found] if (found := objects.by_id(call.tx, after)) else []
    experiment = spec.experiment or spec.name
    tags = tags_of(job, spec)
    return runs.start(call, home, experiment=experiment, name=spec.name, params=params, tags=tags)


def params_of(spec: JobSpec, inputs: Mapping[str, ObjectId]) -> dict[str, str]:
    """Return the command, the framework and the ids of the pinned inputs."""
    command = " ".join([spec.script or f"-m {spec.module}", *spec.args])[:LONGEST_COMMAND]
    read = {f"job.input.{name}": str(ident) for name, ident in inputs.items()}
    return {"job.command": command, "job.framework": spec.framework, **read}


def tags_of(job: ObjectId, spec: JobSpec) -> dict[str, str]:
    """Return the id of the job, and the commit of its code."""
    tags = {"falaj.job": str(job)}
    if spec.origin is not None and spec.origin.commit is not None:
        tags["git.commit"] = spec.origin.commit
    return tags
