"""The evidence for moving an alias to a version: gates, metrics against the current one, approvals, differences."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from nicegui import ui

from falaj.apps.console.components.actions import action_button
from falaj.apps.console.components.sections import Cell, small_table
from falaj.apps.console.components.states import BAD, GOOD, WAITING, empty_state, state_badge
from falaj.apps.console.page import PageContext
from falaj.apps.console.pages.models.catalogue import number_of
from falaj.apps.console.times import Times, number
from falaj.records.models.cards import MetricChange, VersionDiff
from falaj.records.models.gates import GateCheckReport, GateResult
from falaj.records.registry import Alias, Approval, ModelVersion


@dataclass(frozen=True)
class EvidenceRecords:
    """What is known of a version and an alias; `diff` is from the alias's own version, if it is another."""

    version: ModelVersion
    alias: str
    known: Alias | None
    gates: GateCheckReport
    approvals: Sequence[Approval]
    diff: VersionDiff | None


@dataclass(frozen=True)
class GateRow:
    gate: str
    tone: str
    state: str
    value: str
    allowed: str
    fix: str


@dataclass(frozen=True)
class AliasEvidence:
    """What stands beside the buttons. A `…_blocked` says why there is no button, whatever the person's rights are."""

    model: str
    version: str
    id: str
    alias: str
    current: str
    protection: str
    gates: tuple[GateRow, ...]
    metrics: tuple[tuple[str, str, str, str], ...]
    """Name, value of the current version, value of this one, difference."""
    differences: tuple[str, ...]
    approvals: tuple[tuple[str, str, str], ...]
    promote_blocked: str
    approve_blocked: str


def evidence(records: EvidenceRecords, *, person: str, times: Times) -> AliasEvidence:
    """Return the evidence, as the person with the id `person` sees it."""
    version, known = records.version, records.known
    current = None if known is None else known.version
    return AliasEvidence(
        model=version.name,
        version=version.reference,
        id=version.id,
        alias=records.alias,
        current=current or "",
        protection=_protection(known),
        gates=tuple(_gate(each) for each in records.gates.results),
        metrics=tuple(_metric(each) for each in records.diff.metrics)
        if records.diff
        else tuple((name, "–", number(value), "–") for name, value in sorted(version.metrics.items())),
        differences=() if records.diff is None else differences(records.diff),
        approvals=tuple((each.by, times.moment(each.at), each.comment or "–") for each in records.approvals),
        promote_blocked=_promote_blocked(records),
        approve_blocked=_approve_blocked(records, person),
    )


def differences(diff: VersionDiff) -> tuple[str, ...]:
    """Say in one line for each part how much differs."""
    parts = (
        ("files", len(diff.files)),
        ("inputs and outputs", len(diff.signature)),
        ("parameters", len(diff.params)),
        ("packages", len(diff.packages)),
        ("environment", len(diff.environment)),
        ("facts", len(diff.facts)),
        ("lines of the card", sum(line[:1] in "+-" and line[:3] not in ("+++", "---") for line in diff.card)),
    )
    return tuple(f"{name}: {count}" for name, count in parts if count)


def _protection(known: Alias | None) -> str:
    if known is None or not known.protected:
        return "not protected: no approval is needed"
    if known.independent:
        return "protected: needs an approver whom the authors did not appoint"
    return "protected: needs the approval of someone other than the author"


def _gate(result: GateResult) -> GateRow:
    if result.passed:
        tone, state = GOOD, "passes"
    elif result.waived:
        tone, state = WAITING, "waived"
    else:
        tone, state = BAD, "fails"
    return GateRow(result.gate, tone, state, result.value, result.allowed, result.fix)


def _metric(change: MetricChange) -> tuple[str, str, str, str]:
    apart = "–" if change.difference is None else f"{change.difference:+.4g}"
    return change.name, number(change.before), number(change.after), apart


def _failed_gates(records: EvidenceRecords) -> str:
    failed = [each.gate for each in records.gates.results if each.refuses]
    return f"{records.version.reference} fails the gates: {', '.join(failed)}." if failed else ""


def _promote_blocked(records: EvidenceRecords) -> str:
    known, version = records.known, records.version
    if known is not None and known.version == version.reference:
        return f"{version.reference} is {records.alias} now."
    if failed := _failed_gates(records):
        return failed
    counting = [
        each
        for each in records.approvals
        if each.independent or not (known is not None and known.independent)
    ]
    if known is not None and known.protected and not counting:
        return f"{version.reference} waits for the approval of someone else for {records.alias}."
    return ""


def _approve_blocked(records: EvidenceRecords, person: str) -> str:
    known, version = records.known, records.version
    if known is not None and known.version == version.reference:
        return f"{version.reference} is {records.alias} now."
    if version.author == person:
        return f"You made {version.reference}: someone else approves it."
    return _failed_gates(records)


# ------------------------------------------------------------------------------------------- drawing


def draw_evidence(
    context: PageContext,
    view: AliasEvidence,
    *,
    may: frozenset[str],
    comment: Callable[[], str],
    after: Callable[[], Awaitable[None]],
) -> None:
    """Draw the evidence, and the buttons for which it suffices and which the person may press."""
    shown = (
        f"{view.alias} points at {view.current} now" if view.current else f"{view.alias} points nowhere yet"
    )
    ui.label(f"{shown}; {view.protection}.").classes("wrap")
    with ui.element("div").classes("columns flush"):
        with ui.element("div"):
            ui.label("Gates").classes("strong")
            if view.gates:
                for gate in view.gates:
                    _draw_gate(gate)
            else:
                ui.label(f"{view.alias} has no gates.").classes("muted")
            ui.label("Approvals").classes("strong gap-above")
            if view.approvals:
                small_table(("by", "when", "comment"), view.approvals, title="Approvals")
            else:
                ui.label(f"Nobody has approved {view.version} for {view.alias}.").classes("muted")
        with ui.element("div"):
            ui.label("Metrics").classes("strong")
            _draw_metrics(view)
            if view.differences:
                ui.label(f"Differs from {view.current} in {'; '.join(view.differences)}.").classes(
                    "muted small wrap"
                )
                before, now = number_of(view.current), number_of(view.version)
                ui.link(
                    "All differences", context.href("models", view.model, "diff", before=before, after=now)
                )
    _draw_buttons(context, view, may=may, comment=comment, after=after)


def _draw_gate(gate: GateRow) -> None:
    with ui.element("div").classes("tree-row"):
        state_badge(gate.state, tone=gate.tone)
        ui.label(gate.gate).classes("mono wrap")
        if gate.value:
            ui.label(f"is {gate.value}" + (f", allowed {gate.allowed}" if gate.allowed else "")).classes(
                "muted small wrap"
            )
        if gate.fix and gate.tone == BAD:
            ui.label(gate.fix).classes("small wrap")


def _draw_metrics(view: AliasEvidence) -> None:
    if not view.metrics:
        no_metrics(view.version)
        return
    heads = ("metric", view.current or "current", view.version, "difference")
    rows = [[Cell(name), *(Cell(each, tone="figure") for each in figures)] for name, *figures in view.metrics]
    small_table(heads, rows, title="Metrics against the current version")


def no_metrics(version: str) -> None:
    """Say that a version has no metric, and the command that records one."""
    metrics = '{"auc": 0.9}'
    command = f"falaj models record-metrics {version} --on TRAINING_SET --metrics '{metrics}'"
    empty_state("No metric is recorded.", command=command, icon="straighten")


def _draw_buttons(
    context: PageContext,
    view: AliasEvidence,
    *,
    may: frozenset[str],
    comment: Callable[[], str],
    after: Callable[[], Awaitable[None]],
) -> None:
    with ui.element("div").classes("toolbar gap-above"):
        if "models.promote" in may and not view.promote_blocked:
            action_button(
                context,
                f"Promote to {view.alias}",
                "models.promote",
                lambda p: p.models.promote(view.id, to=view.alias),
                may=may,
                done=f"{view.version} is {view.alias}.",
                confirm=f"Promote {view.version} to {view.alias} of {view.model}? "
                + (f"{view.current} leaves it and stays in its history. " if view.current else "")
                + "Who loads the model by this alias gets this version from then on.",
                after=after,
            )
        if "models.approve" in may and not view.approve_blocked:
            action_button(
                context,
                f"Approve for {view.alias}",
                "models.approve",
                lambda p: p.models.approve(view.id, alias=view.alias, comment=comment()),
                may=may,
                done=f"You approved {view.version} for {view.alias}.",
                confirm=f"Approve {view.version} for {view.alias} of {view.model}? "
                "Your name is kept with the evidence on this page. It may then be promoted by others.",
                after=after,
            )
    for action, reason in (
        ("models.promote", view.promote_blocked),
        ("models.approve", view.approve_blocked),
    ):
        if action in may and reason:
            ui.label(reason).classes("muted wrap")
