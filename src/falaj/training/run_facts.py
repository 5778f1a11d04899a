"""What the run of a job says of it from the start: parameters and tags."""

from __future__ import annotations

from collections.abc import Mapping

from falaj.records.names import ObjectId
from falaj.records.training import JobSpec

LONGEST_COMMAND = 6000


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
