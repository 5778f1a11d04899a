"""The steps of a pipeline and how far a run of it has come. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from falaj.apps.console.components.states import BAD, BUSY, GOOD, IDLE, WAITING
from falaj.records.control.pipelines import Pipeline
from falaj.records.control.workflows import WorkflowRun, WorkflowState

APPROVAL = "waits for approval"
"""What a run says while it waits for a person."""


@dataclass(frozen=True)
class PipelineStep:
    """A step of the graph: its state in the newest run, what it works on, and the page of that."""

    key: str
    title: str
    subject: str
    tone: str
    state: str
    page: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Stage:
    """A step for people, and the names of the controller's steps that it consists of, in their order."""

    key: str
    title: str
    names: tuple[str, ...]


def _stages(plan: Pipeline) -> list[_Stage]:
    found = [
        _Stage("data", "Training set", ("training set",)),
        _Stage("train", "Train", ("submit", "train")),
        _Stage("register", "Register", ("read the model's description", "register")),
    ]
    if plan.optimizing is not None:
        found.append(_Stage("optimize", "Optimize", ("optimize", "measure variants")))
    canary = ("look at the champion", "approval to serve", "begin the canary", "canary")
    found.append(_Stage("canary", "Canary", canary))
    promotion = ("approval", "route all to it", "promote", "return to the champion", "tell the verdict")
    found.append(_Stage("promote", "Promote", (*promotion, "look for monitors", "rebase")))
    if plan.predicting is not None:
        found.append(_Stage("predict", "Predict", ("predict", "wait for the predictions")))
    return found


def pipeline_steps(plan: Pipeline, run: WorkflowRun | None) -> tuple[PipelineStep, ...]:
    """Return the steps with their states in a run; without one, none has begun."""
    stages = _stages(plan)
    at = None if run is None else _current(stages, run)
    result: dict[str, Any] = (run.result or {}) if run is not None else {}
    return tuple(
        PipelineStep(
            stage.key,
            stage.title,
            _subject(stage.key, plan),
            *_state(number, stage, at, run, result),
            page=_page(stage.key, plan, result),
        )
        for number, stage in enumerate(stages)
    )


def _current(stages: Sequence[_Stage], run: WorkflowRun) -> int:
    """Return the number of the stage that a run is in, or was in when it ended."""
    doing = run.doing or ""
    if doing.startswith(APPROVAL):
        return next(number for number, stage in enumerate(stages) if stage.key == "promote")
    # the longest name first: "canary" begins no other step, but "approval" begins "approval to serve"
    named = [(name, number) for number, stage in enumerate(stages) for name in stage.names]
    for name, number in sorted(named, key=lambda each: -len(each[0])):
        if doing == name or doing.startswith((f"{name}:", f"{name} ")):
            return number
    done = 0
    for number, stage in enumerate(stages):
        done += len(stage.names)
        if run.step < done:
            return number
    return len(stages) - 1


def _state(
    number: int, stage: _Stage, at: int | None, run: WorkflowRun | None, result: dict[str, Any]
) -> tuple[str, str]:
    if run is None or at is None:
        return IDLE, "not started"
    if run.state is WorkflowState.DONE:
        return _ended(stage, result)
    if number < at:
        return GOOD, "done"
    if number > at:
        return IDLE, "not reached"
    if run.state is WorkflowState.FAILED:
        return BAD, "failed"
    if run.state is WorkflowState.CANCELLED:
        return IDLE, "cancelled"
    if (run.doing or "").startswith(APPROVAL):
        return WAITING, "waits for approval"
    return (WAITING, "waiting") if run.state is WorkflowState.WAITING else (BUSY, run.doing or "running")


def _ended(stage: _Stage, result: dict[str, Any]) -> tuple[str, str]:
    verdict = result.get("verdict") or {}
    if stage.key == "canary":
        outcome = str(verdict.get("outcome", "done")).replace("_", " ")
        return (GOOD if verdict.get("promote") else BAD if outcome == "roll back" else WAITING), outcome
    if stage.key in ("promote", "predict") and not verdict.get("promote"):
        return IDLE, "not promoted"
    if stage.key == "predict" and (result.get("predictions") or {}).get("error"):
        return BAD, "failed"
    return GOOD, "done"


def _subject(key: str, plan: Pipeline) -> str:
    return {
        "data": ", ".join(dict.fromkeys((plan.spine, *plan.views))),
        "train": plan.job.script or plan.job.module or plan.job.name,
        "register": plan.model,
        "optimize": ", ".join(plan.optimizing.recipes) if plan.optimizing is not None else "",
        "canary": f"{plan.endpoint}, {plan.canary.share} % of requests",
        "promote": f"{plan.alias} of {plan.model}",
        "predict": plan.predicting.view if plan.predicting is not None else "",
    }[key]


def _page(key: str, plan: Pipeline, result: dict[str, Any]) -> tuple[str, ...]:
    """Return the page of what a step made in an ended run, or works on."""
    made = {"data": result.get("training_set"), "register": result.get("version")}
    if isinstance(made.get(key), str):
        return "lineage", str(made[key])
    if key == "train" and isinstance(result.get("job"), str):
        return "jobs", str(result["job"])
    pages = {
        "data": ("features", plan.spine),
        "register": ("models", plan.model),
        "canary": ("endpoints", plan.endpoint),
        "promote": ("models", plan.model),
    }
    return pages.get(key, ())
