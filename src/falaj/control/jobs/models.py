"""The model that a job left behind: what the job says of it, and its registration."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from falaj.control.services import Services
from falaj.errors import Conflict, NotFound
from falaj.records.registry import ModelVersion
from falaj.records.training.jobs import Job, JobState

DESCRIPTION = "model.json"
"""What a job says of the model among its outputs; fj.save_model writes it."""
LARGEST_BYTES = 1 << 20


def register_model(
    services: Services, job: Job, model: str, *, training_set: str | None = None, workspace: str | None = None
) -> ModelVersion:
    """Make the model that `job` left behind the next version of `model`, with its run, metrics and training set."""
    if job.state is not JobState.DONE:
        raise Conflict(f"the job {job.name} ({job.id}) is {job.state}: {job.reason or 'it has no model yet'}")
    said = read_description(services, job)
    source = training_set or _training_set(services, job, workspace)
    return register_version(services, job, said, model, training_set=source, workspace=workspace)


def _training_set(services: Services, job: Job, workspace: str | None) -> str | None:
    """The training set among the job's inputs, the one called `training` first; none if there is no such."""
    named = sorted(job.spec.inputs.items(), key=lambda each: each[0] != "training")
    for _, reference in named:
        place, slash, name = reference.rpartition("/")
        kind, colon, _ = name.partition(":")
        if colon and kind != "dataset":
            continue
        home = f"{place}{slash}" or (f"{workspace}/" if workspace else "")
        is_id = name.startswith("dataset_") and not colon
        with suppress(NotFound):
            return services.objects.show(
                name if is_id else f"{home}dataset:{name.removeprefix('dataset:')}"
            ).id
    return None


def read_description(services: Services, job: Job) -> dict[str, Any]:
    """What the job says of its model, with the blobs of its files."""
    outputs = {output.path: output.blob for output in job.outputs}
    if DESCRIPTION not in outputs:
        raise Conflict(f"the job {job.name} left no {DESCRIPTION} behind; fj.save_model writes it")
    text = _beginning(services.blobs.read(outputs[DESCRIPTION]))
    if len(text) > LARGEST_BYTES:
        raise Conflict(f"{DESCRIPTION} of the job {job.name} has more than {LARGEST_BYTES} bytes")
    try:
        said: dict[str, Any] = json.loads(text)
        return said | {"files": {path: outputs[path] for path in said["files"]}}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Conflict(
            f"{DESCRIPTION} of the job {job.name} is not what fj.save_model writes: {error!r}"
        ) from None


def _beginning(pieces: Iterator[bytes]) -> bytes:
    """As much as tells whether there is too much: a job may leave any amount behind."""
    text = b""
    for piece in pieces:
        text += piece
        if len(text) > LARGEST_BYTES:
            break
    return text


def register_version(
    services: Services,
    job: Job,
    said: dict[str, Any],
    model: str,
    *,
    training_set: str | None,
    workspace: str | None,
) -> ModelVersion:
    return services.models.register(
        model,
        files=tuple(said["files"].values()),
        paths=tuple(said["files"]),
        workspace=workspace,
        training_set=training_set,
        run=job.run,
        inputs=said.get("inputs", ()),
        outputs=said.get("outputs", ()),
        metrics=said.get("metrics", {}),
        card=said.get("card", ""),
    )
