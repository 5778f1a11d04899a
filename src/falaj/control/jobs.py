"""The keeper of the queue: admits jobs as the scheduler decides, and looks after every attempt until it is settled.

An attempt is written down before it starts, starting is idempotent, and it is settled in one transaction: so a keeper
that is killed at any moment leaves enough for the next one to go on, and nothing runs twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from falaj.control.attempts import Attempt, Office, Yard, clear_attempt
from falaj.control.behalf import acting, controller_itself
from falaj.control.platform import Rooms
from falaj.control.staging import open_to_pass
from falaj.errors import Conflict, FalajError, Fenced, Unavailable
from falaj.governance.caller import start_thread
from falaj.governance.gate import Gate
from falaj.records.scheduling import Start
from falaj.records.training import JobState
from falaj.scheduling import decide
from falaj.training import store
from falaj.training.queue import snapshot_of

log = logging.getLogger("falaj.controller")

STOP_S = 8.0
AGAIN_S = 1.0
"""So long after an attempt broke off it is taken up again."""


class JobKeeper:
    """Keeps the jobs of the platform, for as long as the lease with `fence` holds."""

    def __init__(
        self, gate: Gate, rooms: Rooms, yard: Yard, *, fence: int, on_lost: Callable[[], NoReturn]
    ) -> None:
        service = controller_itself(gate.database)
        self._office = Office(gate, rooms, service, fence, on_lost)
        self._yard = yard
        self._attempts: dict[str, tuple[Attempt, threading.Thread]] = {}
        self._again_at: dict[str, float] = {}
        open_to_pass(yard.folder)
        self._clear_leftovers()

    def tick(self) -> None:
        """Look after the attempts that there are, and start those that are due."""
        with self._office.gate.database.read() as tx:
            rows = store.unfinished(tx)
        running = [row for row in rows if row["state"] == JobState.RUNNING]
        here = {row["id"] for row in running}
        self._attempts = {
            job: kept for job, kept in self._attempts.items() if job in here or kept[1].is_alive()
        }
        for row in running:
            try:
                self._look_after(row)
            except (Fenced, Unavailable):
                raise
            except Exception:  # one job must not hold up the others
                log.exception("a job cannot be looked after", extra={"job": row["id"]})
        if any(row["state"] == JobState.QUEUED for row in rows):
            self._admit(rows)

    def stop(self) -> None:
        """Have every attempt end and its job go back to the queue; what takes too long is left to the next keeper."""
        for attempt, _ in self._attempts.values():
            attempt.ask("interrupted")
        deadline = time.monotonic() + STOP_S
        for _, thread in self._attempts.values():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _look_after(self, row: Any) -> None:
        attempt, thread = self._attempts.get(row["id"], (None, None))
        if attempt is not None and thread is not None and attempt.number == row["attempt"]:
            if thread.is_alive():
                if row["cancelling"]:
                    attempt.ask("cancelled")
                return
            due = self._again_at.setdefault(row["id"], time.monotonic() + AGAIN_S)
            if time.monotonic() < due:
                return
        self._take_up(row)

    def _take_up(self, row: Any) -> None:
        attempt = Attempt(self._office, self._yard, row)
        if row["cancelling"]:
            attempt.ask("cancelled")
        self._again_at.pop(row["id"], None)
        self._attempts[row["id"]] = attempt, start_thread(attempt.live, name=f"attempt {attempt.name}")

    def _admit(self, rows: list[Any]) -> None:
        now = self._office.gate.clock()
        by_id = {row["id"]: row for row in rows}
        for decision in decide(snapshot_of(rows, self._yard.nodes(), now=now)):
            if isinstance(decision, Start):
                self._begin(by_id[decision.job], decision)

    def _begin(self, row: Any, start: Start) -> None:
        """Write the attempt down, then start it."""
        try:
            with acting(self._office.service, fence=self._office.fence):
                self._office.rooms.jobs.begin(
                    row["id"], attempt=row["attempt"] + 1, placements=start.placements
                )
        except (Fenced, Unavailable):
            raise
        except Conflict:
            return  # cancelled meanwhile
        except FalajError:
            log.exception("a job could not be begun", extra={"job": row["id"]})
            return
        with self._office.gate.database.read() as tx:
            begun = store.row(tx, row["id"])
        if begun["state"] == JobState.RUNNING:
            self._take_up(begun)

    def _clear_leftovers(self) -> None:
        """Remove what is left of attempts that were settled by a keeper which did not get to it."""
        with self._office.gate.database.read() as tx:
            running = {row["id"]: row["attempt"] for row in store.unfinished(tx) if row["state"] == "running"}
        for home in sorted(self._yard.folder.iterdir()):
            numbers = {path.name.lstrip(".").split(".")[0].split("-")[0] for path in home.iterdir()}
            for number in sorted(int(each) for each in numbers if each.isdigit()):
                if running.get(home.name) != number:
                    self._clear(home.name, number)

    def _clear(self, job: str, number: int) -> None:
        """What cannot be removed is left lying: it must not keep the keeper from its work."""
        try:
            clear_attempt(self._yard, job, number)
        except Exception:
            log.exception("what is left of an attempt cannot be removed", extra={"job": job})
