"""Registers the model among the outputs of a job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from falaj.control.services import Services
from falaj.errors import Conflict, Denied, NotFound
from falaj.ports.cluster.python_packages import read_packages
from falaj.records.models.facts import PackagePin, TrainingHardware
from falaj.records.registry import ModelVersion
from falaj.records.training.jobs import Job, JobState

DESCRIPTION = "model.json"
"""The output that describes the model; fj.save_model writes it."""
ENVIRONMENT = "environment.txt"
"""The artifact of a job's run that lists its packages; the platform writes it."""
LARGEST_BYTES = 1 << 20
MOST_PACKAGES = 5000


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
    found = (_dataset(services, reference, workspace) for _, reference in named)
    return next((ident for ident in found if ident is not None), None)


def _dataset(services: Services, reference: str, workspace: str | None) -> str | None:
    """Return the id of the training set that an input refers to; None if it is something else."""
    place, slash, name = reference.rpartition("/")
    kind, colon, _ = name.partition(":")
    if not name or (colon and kind != "dataset"):
        return None
    home = f"{place}{slash}" or (f"{workspace}/" if workspace else "")
    is_id = name.startswith("dataset_") and not colon
    with suppress(NotFound):
        return services.objects.show(name if is_id else f"{home}dataset:{name.removeprefix('dataset:')}").id
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
    """Register a version from the description and the outputs of a job, with the facts that the platform has of it."""
    measured = _measured_sets(services, job, description, workspace)
    packages, environment = _environment(services, job)
    made = services.models.register(
        model,
        files=tuple(description["files"].values()),
        paths=tuple(description["files"]),
        workspace=workspace,
        training_set=training_set,
        run=job.run,
        inputs=description.get("inputs", ()),
        outputs=description.get("outputs", ()),
        metrics=description.get("metrics", {}),
        environment=environment,
        packages=packages,
        hardware=_hardware(services, job),
        licence=description.get("licence"),
        example=description.get("example"),
        code=description.get("code"),
        archive=_archive(job, description),
        card=description.get("card", ""),
    )
    for data, metrics in measured.items():
        services.models.record_metrics(made.id, on=data, metrics=metrics, run=job.run)
    return made


def _archive(job: Job, description: dict[str, Any]) -> str | None:
    """Return the blob of the job's own code, if its description names an entry point without saying where it is."""
    code = description.get("code")
    placed = isinstance(code, dict) and any(
        code.get(each) for each in ("file", "package", "commit", "archive")
    )
    return None if code is None or placed else job.code


def _measured_sets(
    services: Services, job: Job, description: dict[str, Any], workspace: str | None
) -> dict[str, dict[str, float]]:
    """Return the metrics that the job measured on training sets among its inputs, by the ids of those."""
    measured = description.get("measurements") or {}
    if not isinstance(measured, dict):
        raise Conflict(f"measurements in {DESCRIPTION} of the job {job.name} are not a mapping")
    found: dict[str, dict[str, float]] = {}
    for name, metrics in measured.items():
        ident = _dataset(services, job.spec.inputs.get(name, ""), workspace)
        if ident is None:
            known = ", ".join(sorted(job.spec.inputs)) or "none"
            raise Conflict(
                f"the job {job.name} measured on {name!r}, which is no training set among its inputs: {known}"
            )
        found[ident] = metrics
    return found


def _environment(services: Services, job: Job) -> tuple[tuple[PackagePin, ...], dict[str, str]]:
    """Return the packages that the platform listed for the job, and its Python, system, image and commit."""
    facts: dict[str, str] = {}
    if job.spec.origin is not None and job.spec.origin.commit:
        facts["commit"] = job.spec.origin.commit
    text = ""
    with suppress(NotFound, Denied):
        artifacts = {each.path: each.blob for each in services.runs.show(job.run).artifacts}
        if ENVIRONMENT in artifacts:
            text = _beginning(services.blobs.read(artifacts[ENVIRONMENT])).decode(errors="replace")
    notes = [line[2:] for line in text.splitlines() if line.startswith("# ")]
    for note in notes:
        word, _, value = note.partition(" ")
        if word in ("Python", "image", "ran") and value:
            facts[{"Python": "python", "ran": "image.digest"}.get(word, word)] = value[:2000]
    listed = {name.casefold(): (name, version, files) for name, version, files in read_packages(text)}
    pins = []
    for name, version, files in list(listed.values())[:MOST_PACKAGES]:
        with suppress(ValidationError):  # a name that no index has: pip lists what folders say
            pins.append(PackagePin(name=name, version=version, files_sha256=files))
    return tuple(pins), facts


def _hardware(services: Services, job: Job) -> TrainingHardware:
    """Return what the job had of its machine, as far as the machine is still known."""
    found = next((each for each in services.nodes.list() if each.node.name == job.node), None)
    models = [] if found is None else [gpu.model for gpu in found.node.gpus]
    gpus = tuple(models[: job.spec.gpus]) + ("GPU",) * max(0, job.spec.gpus - len(models))
    return TrainingHardware(
        machine=job.node or "",
        cpu_model="" if found is None else _line(found.cpu_model),
        cpus=job.spec.cpus,
        memory_bytes=job.spec.memory_bytes,
        gpus=tuple(_line(each or "GPU") for each in gpus[:1024]),
        driver="" if found is None else _line(found.driver),
        nodes=job.spec.nodes,
    )


def _line(text: str) -> str:
    return "".join(each if each.isprintable() else " " for each in text)[:500]
