"""Replicas as processes of this machine, which accept from listening sockets that their parent holds.

The parent holds several sockets on one port, among which the kernel spreads new connections, and tells each ready
replica which of them to accept from. No socket is ever closed while the parent runs: what arrives at the socket of a
replica that has ended waits in its backlog, until the socket is given to another one (decision record 0043).

A replica is told by lines of JSON on its standard input, whose end means "stop", and reports on a pipe of its own.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from math import lcm
from typing import Any

from pydantic import ValidationError

from falaj.records.control.replicas import RecentLoad, Replica, ReplicaState

LOADING_S = 3.0
"""How long connections wait for a replica that loads its models, while no other is ready."""
MOST_SOCKETS = 60
REPORT_BYTES = 64 * 1024
"""The longest line of a report; a longer one is dropped."""
DRAIN_S = 30.0
"""Deadline of a replica that was replaced."""
GRACE_S = 3.0
"""How long a draining replica waits for clients to leave after their next response; then it closes idle connections."""
ENVIRONMENT = "FALAJ_REPLICA_SOCKETS"
"""The variable that tells a process which replica it is: its name, its sockets by group, and where it reports."""


def sockets_needed(most: int) -> int:
    """Return how many sockets let up to `most` replicas have equal shares of them, or nearly so if there are many."""
    even = lcm(*range(1, most + 1))
    return even if even <= MOST_SOCKETS else 4 * most


def shares(sockets: int, replicas: int, place: int) -> list[int]:
    """Return the indices of the sockets that the replica at `place` among `replicas` accepts from."""
    return list(range(place, sockets, replicas)) or [place % sockets]


@dataclass
class ReplicaProcess:
    """A process, and what it has reported."""

    name: str
    process: subprocess.Popen[bytes]
    orders: int
    """Our end of its standard input."""
    reports: int
    started_at: float
    state: ReplicaState = ReplicaState.STARTING
    loading_since: float = float("inf")
    replaces: str | None = None
    unread: bytes = b""
    load: RecentLoad | None = None
    problem: str | None = None
    deadline: float = float("inf")
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def was_stopped(self) -> bool:
        return self.deadline != float("inf")

    def tell(self, message: Mapping[str, Any]) -> bool:
        """Send a message; false if the process has ended, or has not read the earlier ones."""
        try:
            os.write(self.orders, json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def read_reports(self) -> None:
        """Read what it has reported since the last call."""
        with suppress(BlockingIOError):
            while chunk := os.read(self.reports, REPORT_BYTES):
                *lines, self.unread = (self.unread + chunk).split(b"\n")
                for line in lines:
                    self._take(line)
                if len(self.unread) > REPORT_BYTES:
                    self.unread = b""

    def _take(self, line: bytes) -> None:
        with suppress(ValueError, ValidationError, TypeError, AttributeError):  # a line that is no report
            report = json.loads(line)
            if "load" in report:
                self.load = RecentLoad.model_validate(report["load"])
            if "problem" in report:
                self.problem = str(report["problem"])
            if report.get("state") == "loading":
                self.loading_since = time.monotonic()
            if report.get("state") == "ready" and self.state is ReplicaState.STARTING:
                self.state = ReplicaState.READY

    def end(self) -> None:
        """Close what belongs to a process that has ended."""
        self.read_reports()
        self.state = ReplicaState.ENDED
        os.close(self.reports)
        self.close_orders()

    def close_orders(self) -> None:
        if self.orders >= 0:
            os.close(self.orders)
        self.orders = -1


class ProcessReplicas:
    """Starts `command` for each replica. Each group of `sockets` is shared by all of them."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        sockets: Mapping[str, Sequence[socket.socket]],
        environment: Mapping[str, str],
        output: int,
    ) -> None:
        """`output` is the descriptor that they write to; it stays open."""
        self._command = list(command)
        self._sockets = {group: list(theirs) for group, theirs in sockets.items()}
        self._environment = dict(environment)
        self._output = output
        self._processes: dict[str, ReplicaProcess] = {}

    def start(self, *, replaces: str | None = None) -> str:
        name = next(str(number) for number in range(1, 10**6) if str(number) not in self._processes)
        reports, writing = os.pipe()
        reading, orders = os.pipe()
        try:
            process = self._start(name, reading, writing)
        except OSError:
            os.close(reports)
            os.close(orders)
            raise
        finally:
            os.close(reading)
            os.close(writing)
        os.set_blocking(reports, False)
        os.set_blocking(orders, False)
        now = time.monotonic()
        self._processes[name] = ReplicaProcess(name, process, orders, reports, now, replaces=replaces)
        return name

    def _start(self, name: str, orders: int, reports: int) -> subprocess.Popen[bytes]:
        descriptors = {group: [each.fileno() for each in theirs] for group, theirs in self._sockets.items()}
        facts = {"name": name, "sockets": descriptors, "reports": reports}
        return subprocess.Popen(
            self._command,
            env=self._environment | {"FALAJ_REPLICA": name, ENVIRONMENT: json.dumps(facts)},
            stdin=orders,
            stdout=self._output,
            stderr=self._output,
            pass_fds=(reports, *(number for theirs in descriptors.values() for number in theirs)),
            start_new_session=True,
        )

    def stop(self, name: str, *, within: timedelta) -> None:
        self._stop(self._processes[name], within.total_seconds())
        self._assign()

    def _stop(self, each: ReplicaProcess, within_s: float) -> None:
        if each.state in (ReplicaState.DRAINING, ReplicaState.ENDED):
            return
        was_ready = each.state is ReplicaState.READY
        each.state, each.deadline = ReplicaState.DRAINING, time.monotonic() + within_s
        if not was_ready or not each.tell({"stop": min(GRACE_S, within_s / 2)}):
            each.process.terminate()

    def forget(self, name: str) -> None:
        if self._processes[name].state is ReplicaState.ENDED:
            del self._processes[name]

    def replicas(self) -> Sequence[Replica]:
        for each in self._processes.values():
            self._observe(each)
        self._replace_replaced()
        self._assign()
        now = time.monotonic()
        return [_described(each, now) for each in self._processes.values()]

    def _observe(self, each: ReplicaProcess) -> None:
        if each.state is ReplicaState.ENDED:
            return
        each.read_reports()
        if each.process.poll() is not None:
            each.end()
        elif time.monotonic() > each.deadline:
            each.process.kill()

    def _replace_replaced(self) -> None:
        for each in self._processes.values():
            if each.replaces is not None and each.state is ReplicaState.READY:
                replaced = self._processes.get(each.replaces)
                if replaced is not None:
                    self._stop(replaced, DRAIN_S)
                each.replaces = None

    def _assign(self) -> None:
        """Tell each ready replica which sockets it accepts from."""
        processes = self._processes.values()
        ready = [each for each in processes if each.state is ReplicaState.READY]
        if not ready:
            now = time.monotonic()
            starting = [each for each in processes if each.state is ReplicaState.STARTING]
            ready = [each for each in starting if now - each.loading_since > LOADING_S][:1]
            for each in ready:
                each.state = ReplicaState.READY
        for place, each in enumerate(ready):
            own = {group: shares(len(theirs), len(ready), place) for group, theirs in self._sockets.items()}
            message = {"accept": own, "replicas": len(ready)}
            if message != each.told and each.tell(message):
                each.told = message

    def has_waiting_clients(self) -> bool:
        listening = [each for theirs in self._sockets.values() for each in theirs]
        return bool(select.select(listening, [], [], 0)[0])

    def close(self, *, within: timedelta) -> None:
        by = time.monotonic() + within.total_seconds()
        running = [each for each in self._processes.values() if each.state is not ReplicaState.ENDED]
        for each in running:
            each.close_orders()
            each.process.terminate()
        for each in running:
            try:
                each.process.wait(max(0.1, by - time.monotonic()))
            except subprocess.TimeoutExpired:
                each.process.kill()
                each.process.wait()
            each.end()
        for listener in (each for theirs in self._sockets.values() for each in theirs):
            listener.close()


def _described(each: ReplicaProcess, now: float) -> Replica:
    code = each.process.returncode
    return Replica(
        name=each.name,
        state=each.state,
        age_s=now - each.started_at,
        load=each.load,
        pid=each.process.pid,
        was_stopped=each.was_stopped,
        exit=None if code is None else f"signal {-code}" if code < 0 else f"code {code}",
        problem=each.problem,
    )
