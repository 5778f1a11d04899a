"""The search of a study: submits trials as jobs, follows them, stops those that the pruner judges worse."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from falaj.control.authorization import controller_caller
from falaj.control.services import Services
from falaj.control.tuning import tracked
from falaj.control.workflows.context import WorkflowContext, to_json
from falaj.control.workflows.store import work_row
from falaj.errors import Conflict, Denied, KeyReused, NotFound, Unavailable
from falaj.governance import objects
from falaj.governance.operations.caller import acting_as, current_terms, on_terms
from falaj.ports.workflows import JsonObject
from falaj.records.names import ObjectId
from falaj.records.scheduling.snapshot import Explanation, Reason
from falaj.records.training.jobs import JobSpec, JobState
from falaj.records.tuning import (
    COUNTED,
    StudyOutcome,
    StudyState,
    StudyTrial,
    TrialReport,
    TrialState,
    arguments_of,
    best_trials,
)
from falaj.training import store as job_store
from falaj.training.store import JobRow
from falaj.tuning import store
from falaj.tuning.sampler_process import SamplerProcess

log = logging.getLogger("falaj.controller")

REPORTS_EVERY_S, LONGEST_PAUSE_S = 1.0, 10.0
"""How often the reports of a running trial are read: the pause grows while it reports nothing new."""
EXPLAIN_EVERY_S = 10.0
"""How often it is asked why no trial starts, while all wait."""
IDLE_S = 120.0
"""The process that samples is stopped after so long without use; it takes half a second to start it again."""


class StudySearch:
    """A study in progress. `close` stops the process that samples; what it knows is in the tables of the study."""

    def __init__(
        self, services: Services, context: WorkflowContext, study: str, *, run: str, workspace: str
    ) -> None:
        self._services, self._context = services, context
        self._study, self._run, self._workspace = ObjectId(study), ObjectId(run), workspace
        self._database = services.studies.gate.database
        self._sampler: SamplerProcess | None = None
        self._reset()

    def poll(self) -> JsonObject | None:
        """Take the study one step further; return its outcome once no trial is left. It may be repeated at any time."""
        try:
            return self._poll()
        except Unavailable as error:
            log.warning("study waits for a backing service", extra={"reason": error.message})
            self._reset()
            return None
        except BaseException:
            self._reset()
            raise

    def close(self) -> None:
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None

    def abandon(self, why: str) -> JsonObject:
        """Cancel the trials that are left, and end the study; as the controller: the owner may have lost the right."""
        self._load()
        left = [each for each in self._trials.values() if not each.state.ended]
        for trial in left:
            self._cancel(trial, f"the study ended: {why}")
        ended = [_changed(each, state=TrialState.CANCELLED, reason="the study ended before") for each in left]
        with self._database.read() as tx:
            is_cancelled = work_row(tx, self._context.workflow).cancelling
        state = StudyState.STOPPED if is_cancelled else StudyState.FAILED
        reason = "its workflow was cancelled" if is_cancelled else why[:2000]
        self._record(ended, self._outcome(state=state, reason=reason))
        return {"state": state}

    # ------------------------------------------------------------------------------------------------- steps

    def _poll(self) -> JsonObject | None:
        self._load()
        unfinished = [each for each in self._trials.values() if not each.state.ended]
        idents = [str(each.job) for each in unfinished if each.job]
        with self._database.read() as tx:
            stopper = store.stopped_by(tx, self._study)
            jobs = job_store.job_rows(tx, idents) if idents else {}
        self._follow(unfinished, jobs)
        end = self._end(stopper)
        if end is None:
            self._launch()
        else:
            for trial in self._unfinished():
                self._cancel(trial, end.reason or "the study ends")
                if trial.job is None:
                    self._settle([_changed(trial, state=TrialState.CANCELLED, reason=end.reason)])
        self._tell_wait()
        self._tell_progress()
        self._release_idle()
        return to_json(end) if end is not None and not self._unfinished() else None

    def _end(self, stopper: str | None) -> StudyOutcome | None:
        """Return how the study ends, once nothing further is to be started."""
        settings, counted = self._row.settings, self._count(*COUNTED)
        if stopper is not None:
            return self._outcome(state=StudyState.STOPPED, reason=f"stopped by {stopper}")
        if self._streak >= settings.max_failures:
            last = next(each for each in reversed(self._ended_order) if each.state is TrialState.FAILED)
            words = f"{self._streak} trials in a row failed, the last with: {last.reason}"
            return self._outcome(state=StudyState.FAILED, reason=words[:2000])
        if counted < settings.planned or self._unfinished():
            return None
        if self._count(TrialState.COMPLETE):
            return self._outcome(state=StudyState.DONE, reason=None)
        return self._outcome(state=StudyState.FAILED, reason=f"none of its {counted} trials was completed")

    def _launch(self) -> None:
        """Ask for as many trials as may run at a time, record them, and submit those that have no job yet."""
        settings = self._row.settings
        free = min(settings.parallel - len(self._unfinished()), settings.planned - self._count(*COUNTED))
        if free > 0:
            asked = [self._ask() for _ in range(free)]
            self._record(asked, None)
        for trial in self._unfinished():
            if trial.job is None and time.monotonic() >= self._submit_at:
                self._submit(trial)

    def _ask(self) -> StudyTrial:
        number, params = self._sampling().ask()
        return StudyTrial(number=number, params=params)

    def _submit(self, trial: StudyTrial) -> None:
        try:
            with once(f"{self._study}:trial-{trial.number}"):
                job = self._services.jobs.submit(
                    self._spec(trial), code=self._row.code, workspace=self._workspace
                )
        except KeyReused:
            raise
        except Conflict as error:  # the workspace has as many jobs as it may: some will end
            self._submit_at = time.monotonic() + LONGEST_PAUSE_S
            self._context.report(f"trial {trial.number} waits: {error.message}")
            return
        submitted = _changed(trial, job=job.id, run=job.run)
        tracked.describe_trial(self._services, submitted, study=self._name, parent=self._run)
        self._record([submitted], None)

    def _spec(self, trial: StudyTrial) -> JobSpec:
        """Return the job of a trial; it is validated again with its arguments."""
        spec = self._row.job
        given = {
            "name": f"{self._name[:110]}-{trial.number}",
            "args": (*spec.args, *arguments_of(trial.params)),
            "experiment": spec.experiment or self._name,
        }
        return JobSpec.model_validate(spec.model_dump() | given)

    # ------------------------------------------------------------------------------------------------ trials

    def _follow(self, unfinished: Sequence[StudyTrial], jobs: Mapping[str, JobRow]) -> None:
        ended = []
        for trial in unfinished:
            row = jobs.get(str(trial.job))
            if row is None:
                continue
            if row.state.ended:
                ended.append(self._judge_end(trial, row))
                continue
            state = TrialState.RUNNING if row.state is JobState.RUNNING else TrialState.QUEUED
            if state is not trial.state:
                trial = _changed(trial, state=state)
                self._record([trial], None)
            if trial.pruning:
                self._cancel(trial, str(trial.reason))
            elif self._row.settings.pruning.method != "none" and state is TrialState.RUNNING:
                self._judge_reports(trial)
        if ended:
            self._settle(ended)

    def _judge_end(self, trial: StudyTrial, row: JobRow) -> StudyTrial:
        """Return the trial as its job ended it. One that was done before it could be stopped counts in full."""
        if self._row.settings.pruning.method != "none":
            known = self._reports.get(trial.number, [])
            metric = self._row.settings.objectives[0].metric
            found = [*known, *tracked.read_reports(self._services, str(trial.run), metric, known=known)]
            trial = _changed(trial, reports=tuple(found))
        if row.state is JobState.DONE:
            found_end = tracked.read_outcome(self._services, str(trial.run), self._row.settings.objectives)
            if found_end.fault is None:
                return _changed(
                    trial, state=TrialState.COMPLETE, values=found_end.values, pruning=False, reason=None
                )
            return _changed(trial, state=TrialState.FAILED, reason=found_end.fault)
        if trial.pruning:
            return _changed(trial, state=TrialState.PRUNED)
        state = TrialState.FAILED if row.state is JobState.FAILED else TrialState.CANCELLED
        return _changed(trial, state=state, reason=(row.reason or f"its job {row.state}")[:2000])

    def _judge_reports(self, trial: StudyTrial) -> None:
        """Report new values of a running trial to the pruner, and stop the trial if it says so."""
        now = time.monotonic()
        due, pause = self._report_times.get(trial.number, (0.0, REPORTS_EVERY_S))
        if now < due:
            return
        metric = self._row.settings.objectives[0].metric
        known = self._reports.setdefault(trial.number, [])
        new = tracked.read_reports(self._services, str(trial.run), metric, known=known)
        pause = REPORTS_EVERY_S if new else min(pause * 1.2, LONGEST_PAUSE_S)
        self._report_times[trial.number] = now + pause, pause
        if not new:
            return
        sampling = self._sampling()  # it is told what is known so far
        worse = sampling.report(trial.number, [each.value for each in new], after=len(known))
        known += new
        if trial.number in self._resumed:  # it had gone on with these before
            self._resumed.discard(trial.number)
            return
        if worse:
            method, last = self._row.settings.pruning.method, new[-1]
            reason = f"pruned by {method} after {len(known)} reports: {metric} {last.value:.6g} at step {last.step}"
            stopped = _changed(trial, pruning=True, reason=reason)
            self._record(
                [stopped], None
            )  # before the job is stopped, so that its end is known for what it is
            self._cancel(stopped, reason)

    def _settle(self, ended: Sequence[StudyTrial]) -> None:
        """Tell the sampler how trials ended, and record them with the best trial and the importance."""
        sampling = self._sampling()
        for trial in ended:
            if trial.reports and (left := trial.reports[len(self._reports.get(trial.number, [])) :]):
                known = len(trial.reports) - len(left)
                sampling.report(trial.number, [each.value for each in left], after=known)
            sampling.tell(trial)
            if trial.state is TrialState.PRUNED:
                tracked.tag_state(self._services, trial)
            self._reports.pop(trial.number, None)
        self._importance = sampling.importance()
        after = self._trials | {each.number: each for each in ended}
        best = best_trials([*after.values()], self._row.settings.objectives)
        self._best = tuple(each.number for each in best)
        self._record(ended, self._outcome(state=StudyState.RUNNING, reason=None))

    def _cancel(self, trial: StudyTrial, why: str) -> None:
        if trial.job is None or trial.number in self._cancelled:
            return
        self._cancelled.add(trial.number)
        try:
            with once(f"{self._study}:cancel-{trial.number}"):
                self._services.jobs.cancel(str(trial.job), reason=why[:1900])
        except (Conflict, NotFound):
            pass  # it has ended meanwhile

    # ------------------------------------------------------------------------------------------------- state

    def _reset(self) -> None:
        """Forget what was read: it is read again before the next step."""
        self.close()
        self._loaded = False
        self._trials: dict[int, StudyTrial] = {}
        self._ended_order: list[StudyTrial] = []
        self._reports: dict[int, list[TrialReport]] = {}
        self._report_times: dict[int, tuple[float, float]] = {}
        self._resumed: set[int] = set()
        self._cancelled: set[int] = set()
        self._submit_at = self._explain_at = 0.0
        self._waits_for: Reason | None = None
        self._wait_words = ""
        self._told = ""

    def _load(self) -> None:
        if self._loaded:
            return
        with self._database.read() as tx:
            found = objects.by_id(tx, self._study)
            self._row = store.study_row(tx, self._study)
            trials, events = store.load_trials(tx, self._study)
            idents = [str(each.job) for each in trials if each.job and not each.state.ended]
            jobs = job_store.job_rows(tx, idents) if idents else {}
        self._name = self._study if found is None else found.name
        self._trials = {each.number: each for each in trials}
        self._ended_order = [self._trials[-1 - event] for event in events if event < 0]
        began = {ident for ident, row in jobs.items() if row.attempt > 0}  # also one that was preempted since
        self._resumed = {each.number for each in trials if each.job in began}
        self._best, self._importance = self._row.best, self._row.importance
        self._loaded = True

    def _sampling(self) -> SamplerProcess:
        """Return the process that samples, with all trials so far and what the running ones have reported."""
        if self._sampler is None:
            self._sampler = SamplerProcess(self._row.settings, seed=self._row.seed)
            with self._database.read() as tx:
                self._sampler.replay(*store.load_trials(tx, self._study))
            for number, known in self._reports.items():
                if known:
                    self._sampler.report(number, [each.value for each in known], after=0)
        return self._sampler

    def _release_idle(self) -> None:
        if self._sampler is not None and time.monotonic() - self._sampler.used_at > IDLE_S:
            self.close()

    def _record(self, trials: Sequence[StudyTrial], outcome: StudyOutcome | None) -> None:
        """Store trials as the controller: a person with that right could store made-up results."""
        with acting_as(controller_caller(self._database)), on_terms(fence=current_terms().fence):
            self._services.studies.record(self._study, trials=tuple(trials), outcome=outcome)
        self._trials |= {each.number: each for each in trials}
        self._ended_order += [each for each in trials if each.state.ended]

    def _outcome(self, **values: Any) -> StudyOutcome:
        return StudyOutcome(best=self._best, importance=self._importance, run=self._run, **values)

    def _unfinished(self) -> list[StudyTrial]:
        return [each for each in self._trials.values() if not each.state.ended]

    def _count(self, *states: TrialState) -> int:
        return sum(each.state in states for each in self._trials.values())

    @property
    def _streak(self) -> int:
        """How many trials failed since one was completed or pruned."""
        streak = 0
        for trial in reversed(self._ended_order):
            if trial.state in (TrialState.COMPLETE, TrialState.PRUNED):
                break
            streak += trial.state is TrialState.FAILED
        return streak

    def _tell_wait(self) -> None:
        """Record why the study does not go on, where all of its trials wait: a quota, a spent budget, no room."""
        jobs = [str(each.job) for each in self._unfinished() if each.job is not None]
        if not jobs or self._count(TrialState.RUNNING):
            found = None
        elif time.monotonic() < self._explain_at:
            return
        else:
            self._explain_at = time.monotonic() + EXPLAIN_EVERY_S
            found = self._explained(jobs[0])
        reason = None if found is None else found.reason
        if reason != self._waits_for:
            self._waits_for = reason
            self._wait_words = "" if found is None else f": {found.words}"
            words = None if found is None else f"its trials wait: {found.words}"[:2000]
            self._record([], self._outcome(state=StudyState.RUNNING, reason=words))

    def _explained(self, job: str) -> Explanation | None:
        """Return why a job waits; none if it is about to start, or the owner may not ask."""
        try:
            found = self._services.jobs.explain(job)
        except (Conflict, NotFound, Denied):
            return None
        return found if found.state == "waiting" and found.reason is not None else None

    def _tell_progress(self) -> None:
        done = sum(each.state.ended and each.state in COUNTED for each in self._trials.values())
        running, queued = self._count(TrialState.RUNNING), self._count(TrialState.QUEUED)
        words = f"{running} trials run, {queued} wait in the queue{self._wait_words}"
        if (said := f"{words} {done}") != self._told:
            self._told = said
            self._context.report(words, done=done, of=self._row.settings.planned)


def _changed(trial: StudyTrial, **values: Any) -> StudyTrial:
    return trial.model_copy(update=values)


def once(key: str) -> AbstractContextManager[None]:
    """Make the one operation inside take effect once, by the controller that holds the lease."""
    return on_terms(key=key, fence=current_terms().fence)
