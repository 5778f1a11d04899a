"""`falaj train --nsys`, from the option to the launched command."""

from __future__ import annotations

from pathlib import Path

import pytest

from falaj.apps.cli.commands.train import request_from_options
from falaj.ports.launcher import AttemptState, Launch
from falaj.sdk.definition_files.job_yaml import spell_job
from falaj.sdk.training import prepare
from job_harness import DONE, JobHarness
from polling import eventually


def test_option_reaches_the_job_and_its_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)")

    ready = prepare(request_from_options({"nsys": True}), script=str(tmp_path / "train.py"))

    assert ready.spec.nsys
    assert "nsys: true" in spell_job(ready.spec, script=ready.script)


@pytest.mark.slow
def test_job_is_launched_under_nsys(light_harness: JobHarness) -> None:
    launched: list[Launch] = []

    def run(launch: Launch) -> AttemptState:
        launched.append(launch)
        return DONE

    light_harness.launcher.program = run
    job = light_harness.submit(nsys=True)
    reconciler = light_harness.reconciler()

    def has_ended() -> bool:
        reconciler.tick()
        return light_harness.jobs.show(job.id).state.ended

    eventually(has_ended)
    reconciler.stop()

    assert [launch.nsys for launch in launched] == [True]
