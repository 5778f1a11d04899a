"""What a study reads from runs and writes to them: the only module of tuning that calls tracking."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from falaj.control.services import Services
from falaj.errors import Conflict, NotFound
from falaj.records.names import ObjectId
from falaj.records.tracking import Params
from falaj.records.tuning import MOST_REPORTS, Objective, StudyTrial, TrialReport

STUDY_TAG, TRIAL_TAG, STATE_TAG = "falaj.study", "falaj.trial", "falaj.trial.state"
PARENT_TAG = "mlflow.parentRunId"
"""The tag by which MLflow nests the runs of trials under that of their study."""


class ReportedOutcome(NamedTuple):
    """The last values of the objectives, or why there are none."""

    values: tuple[float, ...] = ()
    fault: str | None = None


def start_study_run(
    services: Services, name: str, objectives: Sequence[Objective], *, workspace: str
) -> ObjectId:
    """Start the run that the report of a study belongs to, in the experiment of its trials."""
    goals: Params = {f"objective.{each.metric}": each.direction for each in objectives}
    run = services.runs.start(
        name, name=f"study {name}", params=goals, tags={STUDY_TAG: name}, workspace=workspace
    )
    return run.id


def describe_trial(services: Services, trial: StudyTrial, *, study: str, parent: ObjectId) -> None:
    """Record the parameters of a trial in its run, and to which study it belongs."""
    run = str(trial.run)
    tags = {STUDY_TAG: study, TRIAL_TAG: str(trial.number), PARENT_TAG: parent}
    services.runs.set_tags(run, tags)
    with suppress(Conflict):  # the script recorded another value, or has ended already
        services.runs.log_params(run, dict(trial.params))


def tag_state(services: Services, trial: StudyTrial) -> None:
    """Record in the run of a pruned trial that it was pruned: the run itself says that it was killed."""
    services.runs.set_tags(str(trial.run), {STATE_TAG: trial.state.value})


def read_reports(
    services: Services, run: str, metric: str, *, known: Sequence[TrialReport]
) -> list[TrialReport]:
    """Return the values of a metric that were reported behind the `known` ones, one for each step, finite ones."""
    seen = {each.step for each in known}
    after = max(seen, default=None)
    try:
        stream = services.runs.metrics(run, metric, **({} if after is None else {"from_step": after}))
    except NotFound:
        return []
    found: dict[int, float] = {}
    for batch in stream:
        pairs = zip(batch.column("step").to_pylist(), batch.column("value").to_pylist(), strict=True)
        found |= {step: value for step, value in pairs if step not in seen and math.isfinite(value)}
        if len(found) > MOST_REPORTS:
            break
    new = [TrialReport(step=step, value=value) for step, value in sorted(found.items())]
    return new[: max(MOST_REPORTS - len(known), 0)]


def read_outcome(services: Services, run: str, objectives: Sequence[Objective]) -> ReportedOutcome:
    """Return the last value of each objective, or what is wrong with one."""
    logged = {each.key: each for each in services.runs.show(run).metrics}
    for each in objectives:
        found = logged.get(each.metric)
        if found is None:
            known = ", ".join(sorted(logged)[:20]) or "no metric at all"
            return ReportedOutcome(fault=f"it reported no metric {each.metric!r}; it reported {known}")
        if not math.isfinite(found.last):
            value = "NaN" if math.isnan(found.last) else "infinite"
            return ReportedOutcome(fault=f"its last {each.metric!r}, of step {found.last_step}, is {value}")
    return ReportedOutcome(values=tuple(logged[each.metric].last for each in objectives))
