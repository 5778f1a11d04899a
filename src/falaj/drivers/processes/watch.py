"""Runs one attempt from its order to its end: starts it in the sandbox, keeps its log, stops it when told."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from falaj.drivers.processes import hang, inside
from falaj.drivers.processes.folder import Folder, machine_run, mark, read, write
from falaj.drivers.processes.guards import Guards
from falaj.drivers.processes.limits import Limits, put_up
from falaj.drivers.processes.masking import Mask
from falaj.drivers.processes.meter import Meter
from falaj.drivers.processes.nsys import under_nsys
from falaj.drivers.processes.order import Order
from falaj.drivers.processes.output import Output
from falaj.drivers.processes.ranks import plan_ranks
from falaj.drivers.processes.reasons import Ended, explain
from falaj.drivers.processes.removing import remove
from falaj.drivers.processes.starting import user_code
from falaj.drivers.processes.stopping import Action, Stopping
from falaj.drivers.processes.talk import Talk
from falaj.drivers.sandbox import sandbox_for
from falaj.ports.launcher import Used

TICK_S = 0.1
SHORT_TICK_S = 0.005
DRAIN_S = 5.0
WAIT_FOR_ROOM_S = 60
CHUNK_BYTES = 1 << 20
STACKS_S = 5.0
HUNG_BYTES = 1 << 20
"""Of what is printed after a hang was noticed: the stacks."""


def watch(folder: Folder, secrets: Mapping[str, str]) -> None:
    found = Order.from_json(read(folder.launch) or {})
    order = replace(found, launch=replace(found.launch, secrets=secrets))
    mask = Mask(secrets.values())
    output = Output(folder.log, limit_bytes=order.log_limit_bytes, mask=mask)
    inside.become_reaper()
    oom_kills, accepted_at = count_oom_kills(), time.time()
    mark(folder.started, machine_run())
    attempt = Watch(folder, order, output)
    try:
        ended = attempt.run()
    except Exception as error:
        inside.end_children()
        ended = Ended(refused=words_of(error))
    output.close()
    if ended.signal == signal.SIGKILL and ended.cause is None and attempt.limits.group is None:
        ended.out_of_memory = count_oom_kills() > oom_kills
    reason = explain(ended, order.launch, output.tail)
    started_at = (read(folder.running) or {"started_at": accepted_at})["started_at"]
    result = {
        "exit_code": ended.exit_code,
        "signal": ended.signal,
        "reason": None
        if reason is None
        else mask.hide(reason.encode(errors="replace")).decode(errors="replace"),
        "started_at": started_at,
        "ended_at": max(started_at, time.time()),  # the clock may have been set back meanwhile
        "used": asdict(attempt.clear()),
        "limits": attempt.limits.words,
        "stopped": ended.cause == "stopped",
    }
    keep(folder.ended, result)


def words_of(error: Exception) -> str:
    """What the user is to read of it; a fault of ours is raised again, and makes the attempt a lost one."""
    from falaj.errors import FalajError  # not sooner: it loads pydantic, for which every start would wait

    if isinstance(error, (FalajError, OSError)):
        return str(error)
    raise error


def keep(path: Path, result: dict[str, Any]) -> None:
    """Write the result down; the attempt may have filled the disk, so give somebody a minute to make room."""
    for _ in range(WAIT_FOR_ROOM_S):
        try:
            return write(path, result)
        except OSError:
            time.sleep(1)
    write(path, result)


class Watch:
    """One attempt while it runs."""

    def __init__(self, folder: Folder, order: Order, output: Output) -> None:
        self._folder = folder
        self._order = order
        self._launch = order.launch
        self._output = output
        self._stop_seen = 0
        self._last: Action | None = None
        self._tick_s = SHORT_TICK_S
        self._told = bytearray()
        self._meter: Meter | None = None
        self.limits = Limits()

    def run(self) -> Ended:
        now, timeout_s = time.monotonic(), self._launch.timeout_s
        self._stopping = Stopping(None if timeout_s is None else now + timeout_s, self._launch.grace_s)
        self._talk = Talk(self._launch.directory)
        self._guards = Guards(self._folder, self._order, now=now)
        reading, writing = pipe()
        try:
            process = self._start(writing)
        finally:
            os.close(writing)
        with selectors.DefaultSelector() as selector:
            selector.register(reading, selectors.EVENT_READ)
            selector.register(self._talk, selectors.EVENT_READ)
            while process.poll() is None:
                for key, _ in selector.select(self._tick_s):
                    self._take_in(selector, key, reading)
                self._look()
                self._enforce(process)
        inside.end_children()  # before the rest of the log is read: strays may hold the pipe
        self._drain(reading)
        if self._talk.has_caller:
            while self._talk.hear():
                pass
        return self._outcome(process.returncode)

    def clear(self) -> Used:
        """Remove what was made for it, and tell what it used."""
        used = Used()
        if self._meter is not None:
            with contextlib.suppress(OSError, ValueError):
                used = self._meter.used()
                self._meter.close()
        if self.limits.group is not None:
            self.limits.group.remove()
        with contextlib.suppress(OSError):
            remove(self._launch.directory / hang.HEARTBEAT)
        return used

    def _start(self, writing: int) -> subprocess.Popen[bytes]:
        walls, most_tasks = self._order.walls, self._guards.most_tasks
        ranks = under_nsys(self._order.nsys, plan_ranks(self._launch), self._launch)
        self.limits = put_up(self._folder, self._order, ranks=len(ranks), most_tasks=most_tasks)
        group = self.limits.group
        self._meter = Meter(self._launch, group=group.path if group else None)
        code = user_code(self._order, ranks, self.limits, control=self._folder.path.parent)
        return sandbox_for(walls.mechanism, walls.facts).start(code, stdout=writing, stderr=writing)

    def _take_in(self, selector: selectors.BaseSelector, key: selectors.SelectorKey, reading: int) -> None:
        if key.fileobj == reading:
            if not self._copy(reading):
                selector.unregister(reading)
        elif not self._talk.has_caller:
            selector.unregister(self._talk)
            self._talk.accept()
            selector.register(self._talk, selectors.EVENT_READ)
            with contextlib.suppress(OSError):  # a full disk is no reason to end it
                write(self._folder.running, {"started_at": time.time(), "limits": self.limits.words})
            self._tick_s = TICK_S
        elif not self._talk.hear():
            selector.unregister(self._talk)
            self._tick_s = SHORT_TICK_S  # it ends
        elif (leaf := self._talk.request()) is not None:
            self._move(leaf)

    def _move(self, leaf: str) -> None:
        if self.limits.group is not None:
            self.limits.group.enter(self._talk.caller(), leaf)
        self._talk.say("entered")

    def _copy(self, reading: int) -> bool:
        """Move what was printed into the log; False at its end."""
        try:
            chunk = os.read(reading, CHUNK_BYTES)
        except BlockingIOError:
            return True
        self._output.add(chunk)
        self._guards.heard(time.monotonic())
        if self._stopping.cause == "hung" and len(self._told) < HUNG_BYTES:
            self._told += chunk
        return bool(chunk)

    def _drain(self, reading: int) -> None:
        """Copy the rest; not for ever, should somebody have got away with the pipe."""
        deadline = time.monotonic() + DRAIN_S
        while self._copy(reading) and time.monotonic() < deadline:
            select.select([reading], [], [], TICK_S)

    def _look(self) -> None:
        """See how it does, and have it end if it has to."""
        if self._meter is not None:
            with contextlib.suppress(OSError, ValueError):
                self._meter.sample()
        if self._stopping.cause is not None or not self._talk.has_caller:
            return
        now = time.monotonic()
        alarm = self._guards.look(now)
        if alarm is None:
            return
        grace_s = self._launch.grace_s
        if alarm.cause == "hung":
            self._talk.say("stacks")
            grace_s += STACKS_S
        self._stopping.ask(alarm.cause, grace_s=grace_s, now=now, why=alarm.why)

    def _enforce(self, process: subprocess.Popen[bytes]) -> None:
        self._see_stop()
        action = self._stopping.due(time.monotonic())
        if action is None or action == self._last:
            return
        if action != "tear down" and self._talk.has_caller:
            self._talk.say(action)
        elif action == "term":
            return  # it is starting; it will be told as soon as it listens
        else:
            os.killpg(process.pid, signal.SIGKILL)
            if self.limits.group is not None:
                self.limits.group.kill()
        self._last = action

    def _see_stop(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            changed = self._folder.stop.stat().st_mtime_ns
            if changed != self._stop_seen:
                self._stop_seen = changed
                grace_s = (read(self._folder.stop) or {})["grace_s"]
                self._stopping.ask("stopped", grace_s=grace_s, now=time.monotonic())

    def _outcome(self, returncode: int) -> Ended:
        ended = Ended(cause=self._stopping.cause, why=self._stopping.why)
        report = self._talk.report()
        if report is not None:
            ended.rank, ended.exit_code, ended.signal = report
        elif self._talk.has_caller:
            ended.signal = (
                signal.SIGKILL
            )  # the first process inside was killed; whatever the walls make of that
        elif returncode < 0:
            ended.signal = -returncode
        else:
            ended.exit_code, ended.began = returncode, False
        if ended.cause in ("timeout", "hung", "fault") and ended.exit_code == 0:
            ended.exit_code, ended.signal = None, signal.SIGTERM  # it ended well only in taking its leave
        ended.process_memory_bytes = self.limits.processes.get("RLIMIT_DATA")
        ended.silent, ended.told = self._guards.silent, self._output.hide(bytes(self._told))
        if self.limits.group is not None:
            ended.killed_for_memory = self.limits.group.oom_killed()
            ended.refused_tasks = self.limits.group.refused_tasks()
        return ended


def pipe() -> tuple[int, int]:
    """For what is printed: large enough not to hold up who prints much, and open to another uid by /dev/stderr."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.fchmod(writing, 0o622)
    with contextlib.suppress(OSError):  # an ordinary user may have used up what all pipes may hold
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, CHUNK_BYTES)
    return reading, writing


def count_oom_kills() -> int:
    """How often the kernel has killed a process for want of memory, here, since the machine started."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
