"""Trials are jobs in the queue: quotas and budgets hold for them, and none of it is a failed trial."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from controller_processes import ControllerProcesses, run_controllers
from falaj.records.scheduling.snapshot import Quota
from falaj.records.training.jobs import Job
from falaj.records.tuning import Study, StudyState, TrialState
from falaj.training.tables import attempts
from platforms import make_platform
from polling import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SPACE = {"x": {"low": -3.0, "high": 3.0}}
SCRIPT = """
import sys
import falaj as fj

x = float(sys.argv[1].partition("=")[2])
fj.job.log(step=1, score=-(x - 1) ** 2)
"""
TOML = """
[prices]
currency = "AED"
cpu_hour = 1.0
"""


@pytest.fixture
def controllers(tmp_path: Path) -> Iterator[ControllerProcesses]:
    with make_platform(tmp_path, toml=TOML) as platform, run_controllers(platform, tmp_path) as made:
        yield made


def tune(controllers: ControllerProcesses, script: str = SCRIPT, **options: Any) -> Study:
    folder = controllers.folder / "trials"
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    given: dict[str, Any] = {"metric": "score", "seed": 5, **options}
    return controllers.platform.tune(folder / "train.py", space=SPACE, **given)


def ended(controllers: ControllerProcesses, study: Study) -> Study:
    eventually(lambda: controllers.platform.studies.show(study.id).state.ended, within=200, every=0.1)
    return controllers.platform.studies.show(study.id)


def jobs_of(controllers: ControllerProcesses, study: Study) -> list[Job]:
    found = controllers.platform.jobs.list(limit=1000).items
    return [each for each in found if each.spec.experiment == study.name]


def test_a_quota_lets_parallel_trials_wait(controllers: ControllerProcesses) -> None:
    platform = controllers.platform
    platform.queues.set("lab", quota=Quota(cpus=1), limit=Quota(cpus=1))
    study = tune(controllers, trials=4, parallel=3, queue="lab")
    controllers.start_controller()

    found = ended(controllers, study)

    assert (found.state, found.counts) == (StudyState.DONE, {TrialState.COMPLETE: 4})
    rows = sorted(platform.rows(attempts), key=lambda row: row["started_at"])
    assert len(rows) == 4
    for earlier, later in pairwise(rows):
        assert earlier["ended_at"] <= later["started_at"]


def test_a_study_says_that_the_budget_is_spent_and_goes_on_when_it_is_raised(
    controllers: ControllerProcesses,
) -> None:
    """Each trial may run for an hour, which costs 1 AED: after the first, the rest of 1 AED does not cover another."""
    platform = controllers.platform
    platform.queues.set_budget("default", money=1.0)
    study = tune(controllers, trials=3, parallel=1, timeout="1h")
    controllers.start_controller()

    waiting = eventually(
        lambda: (found := platform.studies.show(study.id)).reason and found, within=120, every=0.2
    )
    shown = platform.workflows.show(str(waiting.work)).doing
    platform.queues.set_budget("default", money=100.0)
    found = ended(controllers, study)

    assert (waiting.state, waiting.counts[TrialState.COMPLETE]) == (StudyState.RUNNING, 1)
    assert "its trials wait: the budget of its workspace does not cover it" in waiting.reason
    assert "the budget of its workspace" in str(shown)
    assert (found.state, found.reason, found.counts) == (StudyState.DONE, None, {TrialState.COMPLETE: 3})
    assert len(jobs_of(controllers, study)) == 3
