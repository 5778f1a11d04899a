"""Jobs in a browser: they appear live, their logs grow, and their buttons work for those who may."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import falaj as fj
from consoles import RunningConsole, press
from falaj.errors import Denied
from falaj.records.scheduling.snapshot import Quota
from polling import PATIENCE_S

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow
HOSTILE = "<script>document.title='pwned'</script>\"'>{{constructor}} \u202e"
TICKS = """
import sys, time
for number in range(int(sys.argv[1])):
    print(f"tick {number} <script>document.title='pwned'</script>", flush=True)
    time.sleep(0.2)
"""
TRAINING = """
import time
import falaj as fj

for step in range(600):
    fj.job.log(step=step, loss=1 / (1 + step))
    time.sleep(1)
"""
MEASURED = """
import falaj as fj

table = [
    "plan           samples/s  × plain  loss     gradient  s",
    "fp32           1,234      1.00     0.0e+00  0.0e+00   1.2",
    "bf16, compile  2,468      2.00     1.0e-03  2.0e-03   3.4  chosen",
]
fj.job.params(**{"plan": "bf16, compile", "plan.tried": chr(10).join(table), "profile": "input-bound: 61% waits"})
fj.job.log(step=1, step_time=0.031, **{"profile/input": 0.61, "profile/forward": 0.39})
for step in range(5):
    fj.job.log(step=step, **{"system/cpu_utilization_percentage": 40.0 + step, "samples_per_second": 900.0 + step})
(fj.job.outputs / "notes.txt").write_text("kept")
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(text)
    return path


def wait_for_end(console: RunningConsole, job: str) -> None:
    for _ in console.platform.jobs.wait(job):
        pass


def test_a_job_submitted_from_the_command_line_appears_live(
    console: RunningConsole, page: Page, tmp_path: Path
) -> None:
    script(tmp_path, "print('hello')")
    (tmp_path / "job.yaml").write_text("script: train.py\nname: from-the-command-line\n")
    page.goto("/w/default/jobs?filter=from-the-command-line")
    page.get_by_text("No job matches the filter.").wait_for()

    subprocess.run(
        [sys.executable, "-m", "falaj", "jobs", "submit", "job.yaml"],
        cwd=tmp_path,
        env={**os.environ, "FALAJ_HOME": str(console.home)},
        check=True,
        timeout=PATIENCE_S,
    )

    page.get_by_role("link", name="from-the-command-line").wait_for()
    page.locator(".data-table .badge.good", has_text="done").wait_for()
    page.locator(".panel", has_text="by node and GPU").locator("canvas").wait_for()


def test_points_that_a_job_logs_appear_on_the_page_of_its_run(
    console: RunningConsole, page: Page, tmp_path: Path
) -> None:
    from playwright.sync_api import expect

    job = console.platform.train(script(tmp_path, TRAINING), name="logs-points")
    page.goto(f"/w/default/runs/{job.run}")

    points = page.locator("[data-part=points]")
    expect(points).to_have_text(re.compile("^[1-9]"))  # the controller stores them, not the API
    before = points.inner_text()
    expect(points).not_to_have_text(before)
    console.platform.jobs.cancel(job.id)

    page.locator(".badge", has_text="killed").first.wait_for()


def test_a_log_grows_and_the_job_can_be_cancelled_and_retried(
    console: RunningConsole, page: Page, tmp_path: Path
) -> None:
    job = console.platform.train(script(tmp_path, TICKS), args=["600"], name="to-cancel")
    page.goto(f"/w/default/jobs/{job.id}")

    page.locator(".log").get_by_text("tick 3 <script>").wait_for()
    press(page.locator("[data-action='jobs.cancel']"), until=page.get_by_text("asked to end"))
    page.get_by_label("Reason (optional)").fill(HOSTILE)
    page.locator(".q-dialog").get_by_role("button", name="Cancel job").click()

    page.locator(".badge", has_text="cancelled").first.wait_for()
    assert "constructor" in page.locator("[data-part=reason]").inner_text()
    assert page.locator("[data-action='jobs.cancel']").count() == 0
    page.locator("[data-action='jobs.retry']").click()
    page.locator(".badge", has_text="running").first.wait_for()
    assert page.title() == "Job · Falaj"
    console.platform.jobs.cancel(job.id)
    wait_for_end(console, job.id)


def test_a_person_who_may_not_cancel_sees_no_button_and_is_refused(
    console: RunningConsole, tmp_path: Path
) -> None:
    token = console.person("jobs-viewer", "viewer")
    job = console.platform.train(script(tmp_path, TICKS), args=["600"], name="not-theirs")
    context = console.signed_in(token)
    page = context.new_page()

    page.goto(f"/w/default/jobs/{job.id}")

    page.locator(".log").wait_for()
    assert page.locator("[data-action]").count() == 0
    with fj.connect(console.api, token=token) as theirs, pytest.raises(Denied):
        theirs.jobs.cancel(job.id)
    context.close()
    console.platform.jobs.cancel(job.id)
    wait_for_end(console, job.id)


def test_a_waiting_job_explains_itself_and_says_what_would_start_it(
    console: RunningConsole, page: Page, tmp_path: Path
) -> None:
    console.platform.queues.set("narrow", quota=Quota(cpus=1))
    first = console.platform.train(script(tmp_path, TICKS), args=["600"], name="holds", queue="narrow")
    job = console.platform.train(script(tmp_path, TICKS), args=["1"], name="waits", queue="narrow")

    page.goto(f"/w/default/jobs/{job.id}")

    explained = page.locator("[data-part=explain]")
    explained.wait_for()
    assert "quota" in explained.inner_text()
    assert "Position" in explained.inner_text()
    console.platform.jobs.cancel(job.id)
    page.locator(".badge", has_text="cancelled").first.wait_for()
    explained.wait_for(state="detached")
    console.platform.jobs.cancel(first.id)
    wait_for_end(console, first.id)


def test_measurements_of_a_training_are_shown(console: RunningConsole, page: Page, tmp_path: Path) -> None:
    job = console.platform.train(script(tmp_path, MEASURED), args=[HOSTILE], name="measured")
    wait_for_end(console, job.id)

    page.goto(f"/w/default/jobs/{job.id}")

    page.get_by_text("input-bound: 61% waits").wait_for()
    assert page.locator("td", has_text="bf16, compile").inner_text() == "bf16, compile"
    assert page.locator("td", has_text="chosen").count() == 1
    assert page.get_by_text("notes.txt").count() == 1
    assert page.get_by_text("CPU-hours held").count() == 1
    assert HOSTILE.split()[0] in page.locator("dd", has_text="train.py").inner_text()
    assert page.title() == "Job · Falaj"


def test_a_job_that_is_not_there_is_told_in_the_words_of_the_platform(page: Page) -> None:
    page.goto("/w/default/jobs/job_00000000000000000000000000")

    page.locator("[role=alert]").wait_for()

    assert "object.not_found" in page.locator("[role=alert]").inner_text()


def test_jobs_by_state_have_an_address(console: RunningConsole, page: Page) -> None:
    page.goto("/w/default/jobs")

    page.locator(".chip", has_text="failed").click()

    page.wait_for_url("**/jobs?state=failed")
    assert page.locator(".chip.chosen").inner_text().split()[1] == "failed"
