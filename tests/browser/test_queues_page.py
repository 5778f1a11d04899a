"""Queues in a browser: bars against quotas, budgets, and what-if as a form."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import falaj as fj
from consoles import RunningConsole, press
from falaj.errors import Denied
from falaj.records.scheduling.snapshot import Quota

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow


def test_a_queue_that_is_made_elsewhere_appears_with_its_quota(console: RunningConsole, page: Page) -> None:
    page.goto("/w/default/queues")
    page.locator(".data-table").first.wait_for()

    console.platform.queues.set("night-shift", quota=Quota(cpus=3), weight=2.0)

    row = page.locator("tr", has_text="night-shift")
    row.wait_for()
    assert "3 CPUs" in row.inner_text()
    assert page.locator("[aria-label^='CPUs that each queue holds'] canvas").count() == 1


def test_a_what_if_is_asked_by_a_form_and_answered_on_the_page(
    console: RunningConsole, page: Page, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("print('past')")
    job = console.platform.train(tmp_path / "train.py", name="past-job")
    for _ in console.platform.jobs.wait(job.id):
        pass
    page.goto("/w/default/queues")
    form = page.locator("[data-part=what-if]")

    form.get_by_label("New figure (empty: no bound)").fill("8")
    form.get_by_role("button", name="Add the change").click()
    form.get_by_text("quota of default: 8 GPUs").wait_for()
    form.locator("[data-action='queues.what_if']").click()

    form.get_by_text("Fairness (Jain's index, 1 is even)").wait_for()
    assert form.locator("tr", has_text="all").count() == 1
    assert console.platform.queues.show("default").settings.quota.gpus is None  # nothing was changed


def test_a_budget_is_set_on_the_page(console: RunningConsole, page: Page) -> None:
    page.goto("/w/default/queues")

    press(page.locator("[data-action='queues.set_budget']"), until=page.get_by_label("GPU-hours"))
    page.get_by_label("GPU-hours").fill("750")
    page.locator(".q-dialog").get_by_role("button", name="Set").click()

    page.get_by_text("0 of 750 GPU-hours").wait_for()
    assert console.platform.queues.budgets()[0].terms.gpu_hours == 750


def test_a_viewer_has_neither_the_form_nor_the_right(console: RunningConsole) -> None:
    token = console.person("queues-viewer", "viewer")
    context = console.signed_in(token)
    page = context.new_page()

    page.goto("/w/default/queues")

    page.locator(".data-table").first.wait_for()
    page.wait_for_function("window.did_handshake")
    assert page.locator("[data-action]").count() == 0
    assert page.locator("[data-part=what-if]").count() == 0
    with fj.connect(console.api, token=token) as theirs:
        with pytest.raises(Denied):
            theirs.queues.what_if()
        with pytest.raises(Denied):
            theirs.queues.set_budget("default", gpu_hours=1)
    context.close()
