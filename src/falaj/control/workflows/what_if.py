"""What if, as durable work: a process beside the controller replays the past, and what it finds is kept.

Broken off at any moment, it begins anew with the next controller and finds the same: what is asked holds the world of
that time, and the past is read as it was known then.
"""

from __future__ import annotations

import logging
import time
from contextlib import closing

from falaj.control.authorization import controller_caller
from falaj.control.services import Services
from falaj.control.workflows.context import WorkflowContext
from falaj.errors import Unavailable
from falaj.governance.operations.caller import acting_as
from falaj.ports.workflows import JsonObject
from falaj.records.scheduling.simulation import WhatIfComparison, WhatIfQuestion
from falaj.scheduling.simulator.replay_process import ReplayProcess

log = logging.getLogger("falaj.controller")

LOOK_EVERY_S = 0.1
LONGEST_PAUSE_S = 1.0
SAY_EVERY_S = 0.5


def replay_what_if(services: Services, context: WorkflowContext, given: JsonObject) -> JsonObject:
    """Replay what was asked for; the result says of how many jobs, the comparison is for operators only."""
    with closing(WhatIfReplay(services, context, WhatIfQuestion.model_validate(given))) as running:
        return context.wait("replay", running.look, every_s=LOOK_EVERY_S, longest_s=LONGEST_PAUSE_S)


class WhatIfReplay:
    """One that is going on. Closed, its process is gone."""

    def __init__(self, services: Services, context: WorkflowContext, question: WhatIfQuestion) -> None:
        self._services, self._context, self._question = services, context, question
        self._process: ReplayProcess | None = None
        self._said: tuple[int, int] | None = None
        self._say_at = 0.0

    def look(self) -> JsonObject | None:
        """What was kept, once it is. A database that is away for a moment is no reason to give up."""
        try:
            return self._look()
        except Unavailable as error:
            log.warning("a replay waits for a backing service", extra={"reason": error.message})
            return None

    def close(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None

    def _look(self) -> JsonObject | None:
        process = self._process = self._process or self._begin()
        try:
            found = process.look()
        except Unavailable:  # it was not told all of the past, and is to be told anew
            self.close()
            raise
        self._say(process.progress)
        return None if found is None else self._keep(found)

    def _begin(self) -> ReplayProcess:
        asked = self._question
        past = self._services.queues.history(since=asked.since, until=asked.until, as_of=asked.asked_at)
        return ReplayProcess(asked, past)

    def _say(self, progress: tuple[int, int] | None) -> None:
        if progress is not None and progress != self._said and time.monotonic() >= self._say_at:
            self._said, self._say_at = progress, time.monotonic() + SAY_EVERY_S
            done, of = progress
            which = "without the changes" if 2 * done < of else "with the changes"
            self._context.say(f"replay {which}", done=done, of=of)

    def _keep(self, found: WhatIfComparison) -> JsonObject:
        """The controller's own word: whoever asked could else write down what was never replayed."""
        queues, work = self._services.queues, self._context.workflow
        self._context.say("keep what was found", done=2 * found.jobs, of=2 * found.jobs)
        with acting_as(controller_caller(queues.gate.database)):
            kept: JsonObject = queues.save_what_if(work, comparison=found).model_dump(mode="json")
        return kept
