"""`fj.open`: opens the platform of a home in this process, as its owner."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from falaj.assembly import drivers
from falaj.assembly.compute import job_reconciler
from falaj.assembly.home import open_home
from falaj.assembly.platform import LocalPlatform as Assembled
from falaj.assembly.platform import assemble
from falaj.control.controller import Controller
from falaj.control.repeated_failures import RepeatedFailures, describe_cause
from falaj.control.workflows import store
from falaj.governance.operations.caller import start_thread
from falaj.governance.record_stream import CONTROLLER
from falaj.records.record import utc_now
from falaj.sdk.platform import Platform
from falaj.training import store as jobs

log = logging.getLogger("falaj.embedded")


def open_platform(path: str | Path | None = None) -> Platform:
    """Open the home at `path` (FALAJ_HOME, or .falaj here or above) as its owner; HomeBusy if a platform runs on it."""
    home = open_home(None if path is None else Path(path))
    lock = home.lock()
    try:
        assembled = assemble(home, as_owner=True)
    except BaseException:
        lock.close()
        raise
    controller = EmbeddedController(assembled)

    def close() -> None:
        controller.close()
        assembled.close()
        lock.close()

    return Platform(assembled.services, where=str(home.path), on_close=close)


class EmbeddedController:
    """A controller in this process, which starts when there is work; unfinished work continues at the next start.

    Only on SQLite, where no other process uses the database: on PostgreSQL the controllers of the servers do the work.
    """

    def __init__(self, platform: Assembled) -> None:
        self._platform = platform
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        log_file = platform.home.logs / "cli.log"
        self._failures = RepeatedFailures(
            CONTROLLER, f"the logger {log.name}; {log_file} on the command line"
        )
        self._started_at = math.inf
        platform.gate.failing = self.failing
        if not platform.config.metadata.is_shared:
            with platform.database.read() as tx:
                if store.unfinished(tx) or jobs.has_running(tx):
                    platform.intents.pending.set()
            self._thread = start_thread(self._run, name="controller")

    def failing(self) -> Mapping[str, str]:
        """Return the controller, with a sentence that says so, if it keeps failing."""
        if self._failures.is_recovered(ran_s=time.monotonic() - self._started_at):
            self._failures.clear()
        return {CONTROLLER: self._failures.sentence} if self._failures.sentence else {}

    def close(self) -> None:
        self._stop.set()
        self._platform.intents.pending.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        self._platform.intents.pending.wait()
        while not self._stop.is_set():
            started_at = self._started_at = time.monotonic()
            try:
                self._controller().run(self._stop)
            except Exception as error:  # restart it, as the supervisor restarts a controller process
                log.exception("embedded controller failed; restarting it")
                ran_s, self._started_at = time.monotonic() - started_at, math.inf
                self._stop.wait(self._failures.add(describe_cause(error), ran_s=ran_s, now=utc_now()))

    def _controller(self) -> Controller:
        home, config = self._platform.home, self._platform.config
        return Controller(
            self._platform.gate,
            self._platform.services,
            lambda: drivers.open_workflows(home, config),
            holder="embedded",
            on_lost=end_thread,
            jobs=job_reconciler(self._platform),
            wake=self._platform.intents.pending,
            renewed=self._platform.compute.renew_attempts,
        )


def end_thread() -> NoReturn:
    """End the thread that has lost the lease, not the process, which is the user's and holds the home.

    The lease was not renewed in time, or a restarted controller has taken it.
    """
    raise SystemExit
