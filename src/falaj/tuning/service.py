"""Operations on studies: create, follow, stop and resume the search for hyperparameters."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from falaj.errors import AlreadyExists, Conflict, Denied, Fault, InvalidInput
from falaj.governance.blobs.contents import BlobContents
from falaj.governance.blobs.service import WorkflowRequests
from falaj.governance.operations.call import Call, current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, operation
from falaj.governance.operations.pagination import list_workspace_page
from falaj.governance.record_stream import stream_changes
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import Cursor, Page, PageSize
from falaj.records.names import BlobRef, Name, WorkspaceRef
from falaj.records.training.jobs import JobSpec
from falaj.records.tuning import (
    MOST_TRIALS,
    ParamSpace,
    Study,
    StudyOutcome,
    StudyRef,
    StudySettings,
    StudyState,
    StudyTrial,
    TrialState,
    spell,
)
from falaj.tuning import store

WORKFLOW = "studies.create"
NEEDED = ("jobs.submit", "jobs.cancel", "runs.start", "runs.show", "runs.log_params", "runs.set_tags")
"""What a study does on behalf of its owner, beside what its jobs do; a token must be for all of it."""

TrialCount = Annotated[int, Field(ge=1, le=MOST_TRIALS)]
ParallelCount = Annotated[int, Field(ge=1, le=1000)]
ChangedTrials = Annotated[tuple[StudyTrial, ...], Field(max_length=1000)]


class Studies:
    """Studies search for hyperparameters; each trial is a job in the queue."""

    def __init__(self, gate: Gate, blobs: BlobContents, intents: WorkflowRequests) -> None:
        self.gate = gate
        self._blobs = blobs
        self._intents = intents

    @operation(WORKFLOW, resource="workspace")
    def create(
        self,
        name: Name,
        *,
        settings: StudySettings,
        job: JobSpec,
        code: BlobRef | None = None,
        workspace: WorkspaceRef | None = None,
    ) -> Study:
        """Create a study and start its trials: each is `job` with the parameters as further arguments, like --lr=0.01.

        `code` is an uploaded tar.gz that has the script; it is kept from then on. The trials are submitted on your
        behalf, a few at a time, and wait in the queue if there is no room for them.
        """
        call = current_call()
        self._require_rights(call)
        self.gate.require(call, "jobs.submit", call.target)
        if self.gate.named(call, "study", name, workspace=call.target) is not None:
            raise AlreadyExists(
                f"there is a study {name} already",
                faults=[
                    Fault(
                        where="name",
                        given=name,
                        allowed="a name that no other study of the workspace has",
                        fix=f"falaj studies resume {name} goes on with that one; --name gives another name",
                    )
                ],
            )
        if job.script is not None and code is None:
            raise InvalidInput.at("code", allowed=f"the blob of a tar.gz that has {job.script}")
        archive = None if code is None else call.object("code")
        if archive is not None:
            self.gate.require(call, "blobs.read", archive)
            self._blobs.keep(call.tx, self._blobs.facts(call.tx, archive.id), now=call.now)
        new = call.create("study", name, workspace=call.target)
        store.add_study(
            call.tx,
            new.id,
            settings=settings.model_dump(mode="json"),
            seed=settings.seed if settings.seed is not None else secrets.randbits(32),
            job=job.model_dump(mode="json"),
            code=None if archive is None else archive.id,
        )
        requested = self._intents.request(call, WORKFLOW, {"study": new.id, "workspace": call.target.id})
        store.update_study(call.tx, new.id, work=requested.id)
        return store.study_record(call.tx, new)

    @operation("studies.show", resource="study", mode=Mode.READ)
    def show(self, study: StudyRef) -> Study:
        """Show a study: how many trials are in which state, the best so far, and the importance of the parameters."""
        return store.study_record(current_call().tx, current_call().target)

    @operation("studies.list", resource="workspace", mode=Mode.READ)
    def list(
        self, *, workspace: WorkspaceRef | None = None, after: Cursor = "", limit: PageSize = 100
    ) -> Page[Study]:
        """List the studies of a workspace, oldest first."""
        return list_workspace_page(
            self.gate,
            "study",
            lambda tx, page: [store.study_record(tx, each) for each in page],
            after=after,
            limit=limit,
        )

    @operation("studies.trials", resource="study", mode=Mode.READ)
    def trials(
        self,
        study: StudyRef,
        *,
        state: TrialState | None = None,
        after: Cursor = "",
        limit: PageSize = 100,
    ) -> Page[StudyTrial]:
        """List the trials of a study, newest first: their parameters, values, state and job."""
        call = current_call()
        position = self.gate.cursors.read(call, after)
        found = store.list_trials(
            call.tx,
            call.target.id,
            state=state,
            before=int(position) if position else None,
            limit=limit + 1,
        )
        page = found[:limit]
        following = self.gate.cursors.write(call, str(page[-1].number)) if len(found) > limit else None
        return Page(items=tuple(page), next=following)

    @operation("studies.watch", resource="study", mode=Mode.READ)
    def watch(self, study: StudyRef) -> Iterator[Study]:
        """Stream the study at each change until it ends, with heartbeats; the last record says how it ended."""
        target = current_call().target
        return stream_changes(
            self.gate,
            lambda tx: store.study_record(tx, target),
            has_ended=lambda study: study.state.ended,
        )

    @operation("studies.stop", resource="study", confirm=True)
    def stop(self, study: StudyRef) -> Study:
        """Stop a study: no further trial starts, and those that wait or run are cancelled. It can be resumed."""
        call = current_call()
        row = store.study_row(call.tx, call.target.id)
        if row.state.ended:
            raise Conflict(f"study {call.target.name} has ended already: {row.state}")
        store.update_study(call.tx, call.target.id, stopping=call.caller.name)
        return store.study_record(call.tx, call.target)

    @operation("studies.resume", resource="study")
    def resume(
        self,
        study: StudyRef,
        *,
        trials: TrialCount | None = None,
        parallel: ParallelCount | None = None,
        space: ParamSpace | None = None,
    ) -> Study:
        """Go on with a study that has ended, on your behalf, up to `trials` in all; no finished trial is repeated.

        A `space` that is given must be the one that the study was created with.
        """
        call = current_call()
        row = store.study_row(call.tx, call.target.id)
        if not row.state.ended:
            raise Conflict(f"study {call.target.name} is running; falaj studies show {call.target.name}")
        self._require_rights(call)
        if space is not None:
            _require_same_space(call.target.name, row.settings.space, space)
        changed = {"trials": trials, "parallel": parallel}
        settings = StudySettings.model_validate(
            row.settings.model_dump() | {name: value for name, value in changed.items() if value is not None}
        )
        counted = sum(
            count
            for state, count in store.study_record(call.tx, call.target).counts.items()
            if state is not TrialState.CANCELLED
        )
        if counted >= settings.planned:
            raise Conflict(
                f"study {call.target.name} has had its {counted} trials; "
                + (
                    "its grid has no further points"
                    if settings.sampler == "grid"
                    else f"falaj studies resume {call.target.name} --trials {counted + 20} adds 20"
                )
            )
        given = {"study": call.target.id, "workspace": call.target.workspace}
        requested = self._intents.request(call, WORKFLOW, given)
        store.update_study(
            call.tx,
            call.target.id,
            settings=settings.model_dump(mode="json"),
            state=StudyState.RUNNING,
            reason=None,
            stopping=None,
            run=None,
            work=requested.id,
            ended_at=None,
        )
        return store.study_record(call.tx, call.target)

    @operation("studies.record", resource="study", allow=Role.OPERATOR, internal=True, emits=True)
    def record(
        self, study: StudyRef, *, trials: ChangedTrials = (), outcome: StudyOutcome | None = None
    ) -> Study:
        """Record new and changed trials, and what is known of the study. The controller calls this.

        A trial that has ended is never changed.
        """
        call = current_call()
        store.put_trials(call.tx, call.target.id, trials, now=call.now)
        if outcome is not None:
            ended = {"ended_at": call.now} if outcome.state.ended else {}
            store.update_study(call.tx, call.target.id, **store.outcome_columns(outcome), **ended)
        now = store.study_record(call.tx, call.target)
        call.event_data |= {
            "state": now.state,
            "trials": [{"number": each.number, "state": each.state} for each in trials],
        }
        return now

    def _require_rights(self, call: Call) -> None:
        """Raise Denied unless the caller may do what the study does for them."""
        missing = [action for action in NEEDED if not call.caller.may_name(action)]
        if missing:
            raise Denied(
                f"this token is not for {', '.join(missing)}, which the study does for {call.caller.name}"
            )


def _require_same_space(name: str, known: ParamSpace, given: ParamSpace) -> None:
    """Raise Conflict with each parameter that differs."""
    faults = [
        Fault(
            where=f"space.{param}",
            given="none" if param not in given else describe_range(given[param]),
            allowed="none" if param not in known else describe_range(known[param]),
        )
        for param in sorted({*known, *given})
        if known.get(param) != given.get(param)
    ]
    if faults:
        raise Conflict(
            f"study {name} was created with another space; another space is another study: give it another name",
            faults=faults,
        )


def describe_range(given: object) -> str:
    """Return a range as it stands in a file."""
    choices = getattr(given, "choices", None)
    if choices is not None:
        return f"[{', '.join(map(spell, choices))}]"
    low, high = getattr(given, "low", None), getattr(given, "high", None)
    log, step = getattr(given, "log", False), getattr(given, "step", None)
    return f"{low} to {high}{', log' if log else ''}{f', step {step}' if step not in (None, 1) else ''}"
