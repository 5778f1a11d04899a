"""What-if simulations as durable work: a child process replays past jobs, and the comparison is stored.

Interrupted at any moment, the replay starts over with the next controller and gives the same result: the question holds
the cluster of that time, and past jobs are read as they were known then.
"""

from __future__ import annotations

import logging
import time
from contextlib import closing

from falaj.control.authorization import controller_caller
from falaj.control.services import Services
from falaj.control.workflows.context import WorkflowContext, to_json
from falaj.errors import Unavailable
from falaj.governance.operations.caller import acting_as
from falaj.ports.workflows import JsonObject
from falaj.records.scheduling.simulation import WhatIfComparison, WhatIfQuestion
from falaj.scheduling.simulator.replay_process import ReplayProcess

log = logging.getLogger("falaj.controller")

POLL_S = 0.1
LONGEST_PAUSE_S = 1.0
REPORT_S = 0.5


def replay_what_if(services: Services, context: WorkflowContext, given: JsonObject) -> JsonObject:
    """Replay past jobs under other settings; the result counts jobs, the comparison is for operators only."""
    with closing(WhatIfReplay(services, context, WhatIfQuestion.model_validate(given))) as running:
        return context.wait("replay", running.poll, every_s=POLL_S, longest_s=LONGEST_PAUSE_S)


class WhatIfReplay:
    """A replay in progress; `close` stops its process."""

    def __init__(self, services: Services, context: WorkflowContext, question: WhatIfQuestion) -> None:
        self._services, self._context, self._question = services, context, question
        self._process: ReplayProcess | None = None
        self._reported: tuple[int, int] | None = None
        self._report_at = 0.0

    def poll(self) -> JsonObject | None:
        """Return the stored result once there is one. An unavailable database does not end the replay."""
        try:
            return self._poll()
        except Unavailable as error:
            log.warning("replay waits for a backing service", extra={"reason": error.message})
            return None

    def close(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None

    def _poll(self) -> JsonObject | None:
        process = self._process = self._process or self._begin()
        try:
            found = process.look()
        except Unavailable:  # the process did not receive all jobs: start over
            self.close()
            raise
        self._report(process.progress)
        return None if found is None else self._store(found)

    def _begin(self) -> ReplayProcess:
        question = self._question
        past = self._services.queues.history(
            since=question.since, until=question.until, as_of=question.asked_at
        )
        return ReplayProcess(question, past)

    def _report(self, progress: tuple[int, int] | None) -> None:
        if progress is not None and progress != self._reported and time.monotonic() >= self._report_at:
            self._reported, self._report_at = progress, time.monotonic() + REPORT_S
            done, of = progress
            which = "without the changes" if 2 * done < of else "with the changes"
            self._context.report(f"replay {which}", done=done, of=of)

    def _store(self, found: WhatIfComparison) -> JsonObject:
        """Store the comparison as the controller: a requester with that right could store made-up results."""
        queue, work = self._services.queues, self._context.workflow
        self._context.report("store the comparison", done=2 * found.jobs, of=2 * found.jobs)
        with acting_as(controller_caller(queue.gate.database)):
            return to_json(queue.save_what_if(work, comparison=found))
