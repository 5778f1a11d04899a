"""The run of a job: what it says of the job from the start, and which run it goes on from."""

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
CONTINUES_RUN = "job.goes_on_from"
"""The parameter that names the run of the same job before this one; what that one survived, this one has survived."""


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
    """A new run of a job. One that comes `after` another goes on from the same checkpoints: it is told of all that
    the other has survived, and what the other was made from flows into it."""
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
    """The command, and the inputs by their names: the objects themselves, which are pinned."""
    command = " ".join([spec.script or f"-m {spec.module}", *spec.args])[:LONGEST_COMMAND]
    read = {f"job.input.{name}": str(ident) for name, ident in inputs.items()}
    return {"job.command": command, "job.framework": spec.framework, **read}


def tags_of(job: ObjectId, spec: JobSpec) -> dict[str, str]:
    """The job, and the commit that its code stands on."""
    tags = {"falaj.job": str(job)}
    if spec.origin is not None and spec.origin.commit is not None:
        tags["git.commit"] = spec.origin.commit
    return tags
