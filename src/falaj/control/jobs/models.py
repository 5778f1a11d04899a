"""Registers the model among the outputs of a job."""

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
"""The output that describes the model; fj.save_model writes it."""
LARGEST_BYTES = 1 << 20


def register_model(
    services: Services, job: Job, model: str, *, training_set: str | None = None, workspace: str | None = None
) -> ModelVersion:
    """Register the model that `job` wrote as the next version of `model`, with its run, metrics and training set."""
    if job.state is not JobState.DONE:
        raise Conflict(f"the job {job.name} ({job.id}) is {job.state}: {job.reason or 'it has no model yet'}")
    description = read_description(services, job)
    source = training_set or _training_set(services, job, workspace)
    return register_version(services, job, description, model, training_set=source, workspace=workspace)


def _training_set(services: Services, job: Job, workspace: str | None) -> str | None:
    """Return the training set among the job's inputs, preferably the one called `training`, or None."""
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
    """Return the description of the job's model, with the blobs of its files."""
    outputs = {output.path: output.blob for output in job.outputs}
    if DESCRIPTION not in outputs:
        raise Conflict(f"the job {job.name} has no output {DESCRIPTION}; fj.save_model writes it")
    text = _beginning(services.blobs.read(outputs[DESCRIPTION]))
    if len(text) > LARGEST_BYTES:
        raise Conflict(f"{DESCRIPTION} of the job {job.name} has more than {LARGEST_BYTES} bytes")
    try:
        parsed: dict[str, Any] = json.loads(text)
        return parsed | {"files": {path: outputs[path] for path in parsed["files"]}}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Conflict(
            f"{DESCRIPTION} of the job {job.name} is not what fj.save_model writes: {error!r}"
        ) from None


def _beginning(pieces: Iterator[bytes]) -> bytes:
    """Return the first pieces, a little more than the limit at most: the output of a job may have any size."""
    text = b""
    for piece in pieces:
        text += piece
        if len(text) > LARGEST_BYTES:
            break
    return text


def register_version(
    services: Services,
    job: Job,
    description: dict[str, Any],
    model: str,
    *,
    training_set: str | None,
    workspace: str | None,
) -> ModelVersion:
    """Register a version from the description and the outputs of a job."""
    return services.models.register(
        model,
        files=tuple(description["files"].values()),
        paths=tuple(description["files"]),
        workspace=workspace,
        training_set=training_set,
        run=job.run,
        inputs=description.get("inputs", ()),
        outputs=description.get("outputs", ()),
        metrics=description.get("metrics", {}),
        card=description.get("card", ""),
    )
