"""Runs one attempt from start to end: starts it in the sandbox, writes its log, and stops it on request."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from falaj.drivers.processes import attempt_lease
from falaj.drivers.processes.attempt_folder import AttemptFolder, create_marker, read_json, write_json
from falaj.drivers.processes.attempt_spec import AttemptSpec
from falaj.drivers.processes.diagnosis import heartbeats
from falaj.drivers.processes.diagnosis.reasons import AttemptOutcome, explain_failure
from falaj.drivers.processes.limits.enforcement import AppliedLimits, apply_limits
from falaj.drivers.processes.limits.watchdog import AttemptWatchdog, WatchdogAlarm
from falaj.drivers.processes.metering.meter import ResourceMeter
from falaj.drivers.processes.nsys import under_nsys
from falaj.drivers.processes.sandbox_init import init
from falaj.drivers.processes.supervisor.attempt_log import AttemptLog
from falaj.drivers.processes.supervisor.init_channel import InitChannel
from falaj.drivers.processes.supervisor.init_plan import build_user_code, plan_ranks
from falaj.drivers.processes.supervisor.secret_mask import SecretMask
from falaj.drivers.processes.supervisor.termination import StopAction, Termination
from falaj.drivers.processes.tree_removal import remove_tree
from falaj.drivers.sandbox import landlock, sandbox_for
from falaj.ports.launcher import FENCE_GRACE_S, AttemptUsage
from falaj.ports.machine.boot import boot_identity, boot_seconds

TICK_S = 0.1
SHORT_TICK_S = 0.005
DRAIN_S = 5.0
FULL_DISK_RETRIES = 60
CHUNK_BYTES = 1 << 20
PEERS_TIMEOUT_S = 1800.0
"""How long the names of the other nodes may take to be known."""
PEERS_PAUSE_S = 0.5
STACK_DUMP_S = 5.0
STACKS_LIMIT_BYTES = 1 << 20
"""The most output that is kept after a hang was detected: the stacks."""


def supervise(folder: AttemptFolder, secrets: Mapping[str, str]) -> None:
    found = AttemptSpec.from_json(read_json(folder.launch) or {})
    spec = replace(found, launch=replace(found.launch, secrets=secrets))
    mask = SecretMask(secrets.values())
    output = AttemptLog(folder.log, limit_bytes=spec.log_limit_bytes, mask=mask)
    init.become_subreaper()
    oom_kills, accepted_at = count_oom_kills(), time.time()
    create_marker(folder.started, boot_identity())
    attempt = AttemptSupervisor(folder, spec, output)
    try:
        ended = attempt.run()
    except Exception as error:
        init.kill_descendants()
        ended = AttemptOutcome(refused=user_message(error))
    output.close()
    if ended.signal == signal.SIGKILL and ended.cause is None and attempt.limits.group is None:
        ended.out_of_memory = count_oom_kills() > oom_kills
    reason = explain_failure(ended, spec.launch, output.tail)
    started_at = (read_json(folder.running) or {"started_at": accepted_at})["started_at"]
    result = {
        "exit_code": ended.exit_code,
        "signal": ended.signal,
        "reason": None
        if reason is None
        else mask.hide(reason.encode(errors="replace")).decode(errors="replace"),
        "started_at": started_at,
        "ended_at": max(started_at, time.time()),  # the clock may have been set back
        "used": asdict(attempt.close()),
        "limits": attempt.limits.descriptions,
        "stopped": ended.cause == "stopped",
        "fenced": ended.cause == "fenced",
    }
    write_result(folder.ended, result)


def user_message(error: Exception) -> str:
    """Return the message of an expected error. Raise a bug again: the attempt is lost then."""
    # Not imported, since it loads pydantic, which a pod need not have. Without it there is no such error.
    errors = sys.modules.get("falaj.errors")
    if isinstance(error, OSError) or (errors is not None and isinstance(error, errors.FalajError)):
        return str(error)
    raise error


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write the result. Retry for a minute: the attempt may have filled the disk."""
    for _ in range(FULL_DISK_RETRIES):
        try:
            return write_json(path, result)
        except OSError:
            time.sleep(1)
    write_json(path, result)


class AttemptSupervisor:
    """Supervises one attempt while it runs."""

    def __init__(self, folder: AttemptFolder, spec: AttemptSpec, output: AttemptLog) -> None:
        self._folder = folder
        self._spec = spec
        self._launch = spec.launch
        self._output = output
        self._stop_seen = 0
        self._last: StopAction | None = None
        self._tick_s = SHORT_TICK_S
        self._hang_output = bytearray()
        self._meter: ResourceMeter | None = None
        self.limits = AppliedLimits()

    def run(self) -> AttemptOutcome:
        now, timeout_s = time.monotonic(), self._launch.timeout_s
        self._termination = Termination(None if timeout_s is None else now + timeout_s, self._launch.grace_s)
        if self._is_fenced():
            return AttemptOutcome(cause="fenced", signal=signal.SIGKILL)
        if self._launch.peers and (ended := self._find_peers()) is not None:
            return ended
        self._channel = InitChannel(self._launch.directory)
        self._watchdog = AttemptWatchdog(self._folder, self._spec, now=now)
        reading, writing = open_output_pipe()
        try:
            process = self._start(writing)
        finally:
            os.close(writing)
        with selectors.DefaultSelector() as selector:
            selector.register(reading, selectors.EVENT_READ)
            selector.register(self._channel, selectors.EVENT_READ)
            while process.poll() is None:
                for key, _ in selector.select(self._tick_s):
                    self._take_in(selector, key, reading)
                self._look()
                self._enforce(process)
        init.kill_descendants()  # before the rest of the log is read: stray processes may hold the pipe
        self._drain(reading)
        if self._channel.is_connected:
            while self._channel.receive():
                pass
        return self._outcome(process.returncode)

    def close(self) -> AttemptUsage:
        """Remove the cgroup and the heartbeats, and return the used resources."""
        used = AttemptUsage()
        if self._meter is not None:
            with contextlib.suppress(OSError, ValueError):
                used = self._meter.used()
                self._meter.close()
        if self.limits.group is not None:
            self.limits.group.remove()
        left = [self._launch.directory / heartbeats.FOLDER]
        if self._spec.sandbox.mechanism == "landlock":
            left.append(self._launch.directory / landlock.TMP)
            landlock.remove_short_name(self._launch.directory)
        for path in left:
            with contextlib.suppress(OSError):
                remove_tree(path)
        return used

    def _find_peers(self) -> AttemptOutcome | None:
        """Replace the names of the nodes by their addresses, as soon as all are known: a node may start late, and some
        frameworks neither wait for a name nor take one. Return the outcome if it ends before that."""
        peers, deadline = self._launch.peers, time.monotonic() + PEERS_TIMEOUT_S
        known = resolve_names(peers)
        while missing := [name for name in peers if name not in known]:
            self._see_stop()
            if self._termination.due(time.monotonic()) is not None:
                return AttemptOutcome(cause=self._termination.cause, signal=signal.SIGTERM)
            if self._is_fenced():
                return AttemptOutcome(cause="fenced", signal=signal.SIGKILL)
            if time.monotonic() > deadline:
                who = f"{len(missing)} of {len(peers)} nodes are unknown, {missing[0]} among them"
                return AttemptOutcome(
                    refused=f"{who}: their names have no address after {PEERS_TIMEOUT_S:.0f} s"
                )
            time.sleep(PEERS_PAUSE_S)
            known |= resolve_names(missing)
        self._launch = replace(self._launch, peers=tuple(known[name] for name in peers))
        self._spec = replace(self._spec, launch=self._launch)
        return None

    def _start(self, writing: int) -> subprocess.Popen[bytes]:
        sandbox, max_tasks = self._spec.sandbox, self._watchdog.max_tasks
        ranks = under_nsys(self._spec.nsys, plan_ranks(self._launch), self._launch)
        self.limits = apply_limits(self._folder, self._spec, ranks=len(ranks), max_tasks=max_tasks)
        group = self.limits.group
        self._meter = ResourceMeter(self._launch, group=group.path if group else None)
        code = build_user_code(self._spec, ranks, self.limits, control=self._folder.path.parent)
        return sandbox_for(sandbox.mechanism, sandbox.facts).start(code, stdout=writing, stderr=writing)

    def _take_in(self, selector: selectors.BaseSelector, key: selectors.SelectorKey, reading: int) -> None:
        if key.fileobj == reading:
            if not self._copy(reading):
                selector.unregister(reading)
        elif not self._channel.is_connected:
            selector.unregister(self._channel)
            self._channel.accept()
            selector.register(self._channel, selectors.EVENT_READ)
            with contextlib.suppress(OSError):  # a full disk does not end the attempt
                write_json(
                    self._folder.running, {"started_at": time.time(), "limits": self.limits.descriptions}
                )
            self._tick_s = TICK_S
        elif not self._channel.receive():
            selector.unregister(self._channel)
            self._tick_s = SHORT_TICK_S  # it ends
        elif (leaf := self._channel.request()) is not None:
            self._move(leaf)

    def _move(self, leaf: str) -> None:
        if self.limits.group is not None:
            self.limits.group.enter(self._channel.peer_pid(), leaf)
        self._channel.send("entered")

    def _copy(self, reading: int) -> bool:
        """Copy output to the log. Return False at its end."""
        try:
            chunk = os.read(reading, CHUNK_BYTES)
        except BlockingIOError:
            return True
        self._output.add(chunk)
        self._watchdog.record_output(time.monotonic())
        if self._termination.cause == "hung" and len(self._hang_output) < STACKS_LIMIT_BYTES:
            self._hang_output += chunk
        return bool(chunk)

    def _drain(self, reading: int) -> None:
        """Copy the rest of the output, for a limited time: a process that escaped may hold the pipe."""
        deadline = time.monotonic() + DRAIN_S
        while self._copy(reading) and time.monotonic() < deadline:
            select.select([reading], [], [], TICK_S)

    def _look(self) -> None:
        """Sample the meter and run the watchdog; request the end of the attempt on an alarm."""
        if self._meter is not None:
            with contextlib.suppress(OSError, ValueError):
                self._meter.sample()
        if self._termination.cause is not None or not self._channel.is_connected:
            return
        now = time.monotonic()
        alarm = self._watchdog.check(now) or self._look_at_memory()
        if alarm is None:
            return
        grace_s = self._launch.grace_s
        if alarm.cause == "hung":
            self._channel.send("stacks")
            grace_s += STACK_DUMP_S
        self._termination.request(alarm.cause, grace_s=grace_s, now=now, why=alarm.why)

    def _look_at_memory(self) -> WatchdogAlarm | None:
        """Return an alarm if the processes together held too much when the meter took its last sample."""
        fault = None if self._meter is None else self.limits.memory_fault(self._meter.held_bytes)
        return None if fault is None else WatchdogAlarm("fault", fault)

    def _is_fenced(self) -> bool:
        """Return whether the lease of the attempts of this home has run out."""
        lease = self._spec.lease
        return lease is not None and attempt_lease.is_over(lease, boot_seconds())

    def _enforce(self, process: subprocess.Popen[bytes]) -> None:
        self._see_stop()
        if self._termination.cause != "fenced" and self._is_fenced():
            self._termination.request("fenced", grace_s=FENCE_GRACE_S, now=time.monotonic())
        action = self._termination.due(time.monotonic())
        if action is None or action == self._last:
            return
        if action != "tear down" and self._channel.is_connected:
            self._channel.send(action)
        elif action == "term":
            return  # it is starting, and is told as soon as it is connected
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
                grace_s = (read_json(self._folder.stop) or {})["grace_s"]
                self._termination.request("stopped", grace_s=grace_s, now=time.monotonic())

    def _outcome(self, returncode: int) -> AttemptOutcome:
        ended = AttemptOutcome(cause=self._termination.cause, why=self._termination.why)
        report = self._channel.report()
        if report is not None:
            ended.rank, ended.exit_code, ended.signal = report
        elif self._channel.is_connected:
            ended.signal = signal.SIGKILL  # the init process was killed; the exit code is the sandbox's
        elif returncode < 0:
            ended.signal = -returncode
        else:
            ended.exit_code, ended.began = returncode, False
        if ended.cause in ("timeout", "hung", "fault", "fenced") and ended.exit_code == 0:
            ended.exit_code, ended.signal = (
                None,
                signal.SIGTERM,
            )  # exit code 0 was only its response to SIGTERM
        ended.process_memory_bytes = self.limits.processes.get("RLIMIT_DATA")
        ended.silent_ranks, ended.hang_output = (
            self._watchdog.silent_ranks,
            self._output.hide(bytes(self._hang_output)),
        )
        if self.limits.group is not None:
            ended.killed_for_memory = self.limits.group.oom_killed()
            ended.refused_tasks = self.limits.group.refused_tasks()
        return ended


def resolve_names(names: Iterable[str]) -> dict[str, str]:
    """Return the address of each name that has one by now; addresses stay what they are."""
    found = {}
    for name in names:
        with contextlib.suppress(OSError, UnicodeError):
            found[name] = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    return found


def open_output_pipe() -> tuple[int, int]:
    """Return a pipe for the output: large, and writable by another uid through /dev/stderr."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.fchmod(writing, 0o622)
    with contextlib.suppress(OSError):  # the user may have reached the limit for all pipes
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, CHUNK_BYTES)
    return reading, writing


def count_oom_kills() -> int:
    """Return how many processes the OOM killer has killed since boot."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
