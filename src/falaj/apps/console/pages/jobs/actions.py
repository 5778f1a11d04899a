"""Buttons of a job: cancel, retry and move, each only where the person may and the job can."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from nicegui import ui

from falaj.apps.console.components.actions import action_button
from falaj.apps.console.page import PageContext
from falaj.records.training.jobs import Job, JobState

ACTIONS = ("jobs.cancel", "jobs.retry", "jobs.move")
RETRIED = (JobState.FAILED, JobState.CANCELLED)


def possible_actions(job: Job, may: Collection[str]) -> frozenset[str]:
    """Return those of the actions that the person may perform and that the state of the job allows."""
    fitting = {
        "jobs.cancel": not job.state.ended and not job.cancelling,
        "jobs.retry": job.state in RETRIED,
        "jobs.move": not job.state.ended and not job.cancelling,
    }
    return frozenset(action for action, fits in fitting.items() if fits and action in may)


def draw_actions(
    context: PageContext,
    job: str,
    name: str,
    state: str,
    may: Collection[str],
    after: Callable[[], Awaitable[None]],
) -> None:
    """Draw the buttons; `after` is called when something was done."""
    if "jobs.cancel" in may:
        button = ui.button("Cancel job", icon="cancel").props("outline dense data-action=jobs.cancel")
        button.on_click(lambda: _cancel(context, job, name, state, after))
    action_button(
        context,
        "Retry",
        "jobs.retry",
        lambda p: p.jobs.retry(job),
        may=may,
        done="The job is queued again.",
        icon="replay",
        after=after,
    )
    if "jobs.move" in may:
        button = ui.button("Move", icon="drive_file_move").props("outline dense data-action=jobs.move")
        button.on_click(lambda: _move(context, job, name, state, after))


async def _cancel(
    context: PageContext, job: str, name: str, state: str, after: Callable[[], Awaitable[None]]
) -> None:
    happens = (
        "Its processes are asked to end, and killed if they do not. Checkpoints and logs stay; it can be retried."
        if state == JobState.RUNNING
        else "It leaves the queue. It can be retried."
    )
    with context.client.content, ui.dialog() as dialog, ui.card().classes("wide-card"):
        ui.label(f"Cancel job {name}?").classes("state-title")
        ui.label(happens)
        reason = ui.input("Reason (optional)").props("outlined dense maxlength=2000").classes("full")
        with ui.row():
            ui.button("Cancel job", on_click=lambda: dialog.submit(True)).props("unelevated color=negative")
            ui.button("Keep it", on_click=lambda: dialog.submit(False)).props("flat autofocus")
    agreed = await dialog
    words = str(reason.value or "").strip() or None
    dialog.delete()
    if agreed:
        done = "The job is being cancelled." if state == JobState.RUNNING else "The job is cancelled."
        await context.act(lambda p: p.jobs.cancel(job, reason=words), done=done)
        await after()


async def _move(
    context: PageContext, job: str, name: str, state: str, after: Callable[[], Awaitable[None]]
) -> None:
    with context.client.content, ui.dialog() as dialog, ui.card().classes("wide-card"):
        ui.label(f"Move job {name}").classes("state-title")
        ui.label(
            "A running job saves a checkpoint, stops, and goes on from it there; one without checkpoints starts over. "
            "Its place in the queue stays."
            if state == JobState.RUNNING
            else "It keeps its place in the queue."
        )
        to = ui.select({"": "as it is", "cpu": "CPUs only", "gpu": "GPUs"}, value="", label="Device")
        pool = ui.input("Pool", placeholder="as it is")
        counts = {
            label: ui.number(label, placeholder="as it is", min=least, precision=0)
            for label, least in (("Nodes", 1), ("GPUs of a node", 0), ("CPUs of a node", 1))
        }
        for field in (to, pool, *counts.values()):
            field.props("outlined dense").classes("full")
        with ui.row():
            ui.button("Move", on_click=lambda: dialog.submit(True)).props("unelevated")
            ui.button("Leave it", on_click=lambda: dialog.submit(False)).props("flat autofocus")
    agreed = await dialog
    device, place = to.value or None, str(pool.value or "").strip() or None
    nodes, gpus, cpus = (None if each.value is None else int(each.value) for each in counts.values())
    dialog.delete()
    if agreed:
        await context.act(
            lambda p: p.jobs.move(job, to=device, pool=place, nodes=nodes, gpus=gpus, cpus=cpus),
            done=lambda moved: moved.words,
        )
        await after()
