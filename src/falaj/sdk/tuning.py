"""Tuning from Python: read the space, pack the code, upload it, and create the study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from falaj.errors import Fault, InvalidInput
from falaj.governance.operations.operation import invalid
from falaj.records.tuning import (
    Objective,
    Pruning,
    Study,
    StudySettings,
    default_direction,
    grid_size,
)
from falaj.sdk.definition_files.space_toml import parse_space, read_space
from falaj.sdk.job_request import parse_job_request
from falaj.sdk.training import PreparedJob, prepare

if TYPE_CHECKING:
    from falaj.sdk.platform import Platform

DIRECTIONS = ("maximize", "minimize")


class PreparedStudy(NamedTuple):
    """A study that is ready to create."""

    name: str
    settings: StudySettings
    job: PreparedJob


def tune(
    platform: Platform,
    script: str | Path,
    *,
    space: str | Path | Mapping[str, Any],
    metric: str | Sequence[str],
    direction: str | Sequence[str] | None = None,
    name: str | None = None,
    **options: Any,
) -> Study:
    """Create a study that runs `script` with values of `space`; `options` are those of `falaj tune` and `train`."""
    search = {key: options.pop(key) for key in [*options] if key in SEARCH_OPTIONS}
    form = parse_job_request({k: v for k, v in options.items() if v is not None}, place=".".join)
    ready = prepare_study(
        prepare(form, script=script), space=space, metric=metric, direction=direction, name=name, **search
    )
    return create(platform, ready)


SEARCH_OPTIONS = (
    *("trials", "parallel", "sampler", "pruner", "min_reports", "reduction", "startup_trials", "seed"),
    *("max_failures", "register"),
)


def prepare_study(
    job: PreparedJob,
    *,
    space: str | Path | Mapping[str, Any],
    metric: str | Sequence[str],
    direction: str | Sequence[str] | None = None,
    name: str | None = None,
    pruner: str = "none",
    register: str | None = None,
    **search: Any,
) -> PreparedStudy:
    """Return the study that is asked for; raise InvalidInput with all faults of the space, or of the settings."""
    found = parse_space(space) if isinstance(space, Mapping) else read_space(space)
    judged = {key: search.pop(key) for key in ("min_reports", "reduction", "startup_trials") if key in search}
    given = {key: value for key, value in search.items() if value is not None}
    if given.get("sampler") == "grid" and "trials" not in given:
        given["trials"] = max(grid_size(found), 1)
    try:
        settings = StudySettings(
            space=found,
            objectives=_objectives(metric, direction),
            pruning=Pruning(method=pruner, **{k: v for k, v in judged.items() if v is not None}),  # type: ignore[arg-type]
            register_as=register,
            **given,
        )
    except ValidationError as error:
        raise InvalidInput("the study is not valid", faults=invalid("study", error).faults) from None
    return PreparedStudy(name or job.spec.name, settings, job)


def create(platform: Platform, ready: PreparedStudy) -> Study:
    """Upload the code, and create the study."""
    from falaj.sdk.platform import chunks

    code = platform.blobs.upload(chunks(ready.job.packed.archive), workspace=ready.job.workspace)
    return platform.studies.create(
        ready.name, settings=ready.settings, job=ready.job.spec, code=code.id, workspace=ready.job.workspace
    )


def _objectives(metric: str | Sequence[str], direction: str | Sequence[str] | None) -> tuple[Objective, ...]:
    metrics = [metric] if isinstance(metric, str) else [*metric]
    given = [direction] if isinstance(direction, str) else [*(direction or ())]
    if given and len(given) != len(metrics):
        raise InvalidInput.at(
            "direction",
            given=", ".join(given),
            allowed=f"one for each of {len(metrics)} metrics, in their order",
        )
    wrong = [each for each in given if each not in DIRECTIONS]
    if wrong:
        faults = [Fault(where="direction", given=each, allowed=" or ".join(DIRECTIONS)) for each in wrong]
        raise InvalidInput("direction is not valid", faults=faults)
    chosen = given or [default_direction(each) for each in metrics]
    return tuple(
        Objective(metric=name, direction=each)  # type: ignore[arg-type]
        for name, each in zip(metrics, chosen, strict=True)
    )
