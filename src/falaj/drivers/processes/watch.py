"""Runs one attempt from its order to its end: starts it in the sandbox, keeps its log, stops it when told."""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from falaj.drivers.processes import inside
from falaj.drivers.processes.folder import Folder, mark, read, write
from falaj.drivers.processes.order import Order
from falaj.drivers.processes.output import Output
from falaj.drivers.processes.ranks import environment, plan_ranks
from falaj.drivers.processes.reasons import Ended, explain
from falaj.drivers.processes.stopping import Action, Stopping
from falaj.drivers.processes.talk import SOCKET, Talk
from falaj.drivers.sandbox import sandbox_for
from falaj.errors import FalajError
from falaj.ports.launcher import Launch
from falaj.ports.sandbox import UserCode

TICK_S = 0.1
SHORT_TICK_S = 0.005
DRAIN_S = 5.0
WAIT_FOR_ROOM_S = 60
CHUNK_BYTES = 1 << 20
PLAN = ".falaj-plan"
"""In the attempt's directory, which is handed to user code only afterwards."""


def watch(folder: Folder) -> None:
    order = Order.from_json(read(folder.launch) or {})
    output = Output(folder.log, limit_bytes=order.log_limit_bytes)
    inside.become_reaper()
    oom_kills, accepted_at = count_oom_kills(), time.time()
    mark(folder.started)
    try:
        ended = Watch(folder, order, output).run()
    except (FalajError, OSError) as error:
        inside.end_children()
        ended = Ended(refused=str(error))
    output.close()
    if ended.signal == signal.SIGKILL and ended.cause is None:
        ended.out_of_memory = count_oom_kills() > oom_kills
    result = {
        "exit_code": ended.exit_code,
        "signal": ended.signal,
        "reason": explain(ended, order.launch, output.tail),
        "started_at": (read(folder.running) or {"started_at": accepted_at})["started_at"],
        "ended_at": time.time(),
    }
    keep(folder.ended, result)


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
        self._talk = Talk(order.launch.directory)
        timeout_s = order.launch.timeout_s
        timeout_at = None if timeout_s is None else time.monotonic() + timeout_s
        self._stopping = Stopping(timeout_at, order.launch.grace_s)
        self._stop_seen = 0
        self._last: Action | None = None
        self._tick_s = SHORT_TICK_S

    def run(self) -> Ended:
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
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
                self._enforce(process)
        inside.end_children()  # before the rest of the log is read: strays may hold the pipe
        self._drain(reading)
        if self._talk.has_caller:
            while self._talk.hear():
                pass
        return self._outcome(process.returncode)

    def _start(self, writing: int) -> subprocess.Popen[bytes]:
        walls = self._order.walls
        code = user_code(self._launch, walls.facts.python, control=self._folder.path.parent)
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
                write(self._folder.running, {"started_at": time.time()})
            self._tick_s = TICK_S
        elif not self._talk.hear():
            selector.unregister(self._talk)
            self._tick_s = SHORT_TICK_S  # it ends

    def _copy(self, reading: int) -> bool:
        """Move what was printed into the log; False at its end."""
        try:
            chunk = os.read(reading, CHUNK_BYTES)
        except BlockingIOError:
            return True
        self._output.add(chunk)
        return bool(chunk)

    def _drain(self, reading: int) -> None:
        """Copy the rest; not for ever, should somebody have got away with the pipe."""
        deadline = time.monotonic() + DRAIN_S
        while self._copy(reading) and time.monotonic() < deadline:
            select.select([reading], [], [], TICK_S)

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
        self._last = action

    def _see_stop(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            changed = self._folder.stop.stat().st_mtime_ns
            if changed != self._stop_seen:
                self._stop_seen = changed
                grace_s = (read(self._folder.stop) or {})["grace_s"]
                self._stopping.ask("stopped", grace_s=grace_s, now=time.monotonic())

    def _outcome(self, returncode: int) -> Ended:
        ended = Ended(cause=self._stopping.cause)
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
        return ended


def user_code(launch: Launch, python: str, *, control: Path) -> UserCode:
    """The first process inside, which finds what to run in a file: one argument may have 128 KiB only."""
    plan = {
        "socket": SOCKET,
        "folder": str(launch.directory.absolute() / "code"),
        "ranks": plan_ranks(launch),
        "memory_bytes": launch.memory_bytes,
        "grace_s": launch.grace_s,
    }
    written = launch.directory.absolute() / PLAN
    written.write_text(json.dumps(plan), encoding="utf-8")
    text = Path(inside.__file__).read_text(encoding="utf-8")
    return UserCode(
        command=[python, "-I", "-S", "-c", text, str(written)],
        directory=launch.directory,
        environment=environment(launch),
        readable=launch.readable,
        hidden=[*launch.hidden, control],
        network=launch.network,
        devices=gpu_devices() if launch.gpus else [],
    )


def gpu_devices() -> list[Path]:
    """NVIDIA's devices, all of them: their numbers need not be those of CUDA, which chooses among them."""
    return sorted(path for path in Path("/dev").glob("nvidia*") if path.is_char_device())


def count_oom_kills() -> int:
    """How often the kernel has killed a process for want of memory, here, since the machine started."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
