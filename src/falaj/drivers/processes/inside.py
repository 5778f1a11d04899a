"""The first process inside the sandbox: starts the ranks, passes a stop on to them, and leaves none behind.

Its text is sent to a Python in the sandbox, where nothing of ours is installed: standard library only. It
speaks with the shim over a socket: "running" and how the ranks ended go up, "term" and "kill" come down. Where
the stream ends, the shim is gone, and everything here ends too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from typing import Any

COULD_NOT_START = 127
CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


class Gang:
    """Ranks that live and die together."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self._ranks: dict[int, int] = {}  # pid -> rank
        self._started: list[subprocess.Popen[bytes]] = []
        self._kill_at: float | None = None
        self.ended: dict[str, int | None] | None = None
        """How it ended: rank, exit code, signal; that of the first rank that failed, if one did."""

    @property
    def is_over(self) -> bool:
        return not self._ranks

    @property
    def patience_s(self) -> float | None:
        """How long to wait for the ranks before they are killed."""
        return None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())

    def start(self) -> None:
        for rank, each in enumerate(self._plan["ranks"]):
            try:
                process = subprocess.Popen(
                    each["command"],
                    cwd=self._plan["folder"],
                    env={**os.environ, **each["environment"]},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    preexec_fn=self._limit_memory,
                )
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                print(f"{each['command'][0]}: {error}", file=sys.stderr, flush=True)
                self._note(rank, COULD_NOT_START, None)
                return
            self._started.append(process)
            self._ranks[process.pid] = rank

    def _limit_memory(self) -> None:
        limit = self._plan["memory_bytes"]
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    def reap(self) -> None:
        """Take note of every process that has ended; the first failure stops the others."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            rank = self._ranks.pop(pid, None)
            if rank is None:
                continue  # an orphan of the user's
            if os.WIFSIGNALED(status):
                self._note(rank, None, os.WTERMSIG(status))
            else:
                self._note(rank, os.WEXITSTATUS(status), None)

    def _note(self, rank: int, exit_code: int | None, killed_by: int | None) -> None:
        failed_before = self.ended is not None and self.ended["exit_code"] != 0
        if not failed_before:
            self.ended = {"rank": rank, "exit_code": exit_code, "signal": killed_by}
        if exit_code != 0 and not failed_before:
            self.terminate()
            self._kill_at = time.monotonic() + self._plan["grace_s"]

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._kill_at = None
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        for pid in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)


def main(plan: dict[str, Any]) -> int:
    become_reaper()
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # not ignored: ranks would inherit that
    with socket.socket(socket.AF_UNIX) as shim:
        shim.connect(plan["socket"])
        shim.sendall(b'{"running": true}\n')
        gang = Gang(plan)
        gang.start()
        attend(gang, shim, wake)
        end_children()
        ended = gang.ended or {"rank": 0, "exit_code": None, "signal": signal.SIGKILL}
        with contextlib.suppress(OSError):
            shim.sendall(json.dumps(ended).encode() + b"\n")
    code = ended["exit_code"]
    return code if code is not None else 128 + (ended["signal"] or 0)


def attend(gang: Gang, shim: socket.socket, wake: int) -> None:
    """Until all ranks have ended: reap them, and do what the shim says."""
    gang.reap()
    while not gang.is_over:
        ready, _, _ = select.select([shim.fileno(), wake], [], [], gang.patience_s)
        if not ready:
            gang.kill()
        if wake in ready:
            os.read(wake, 4096)
        if shim.fileno() in ready:
            words = hear(shim)
            if not words:
                gang.kill()
                return
            if "term" in words:
                gang.terminate()
            if "kill" in words:
                gang.kill()
        gang.reap()


def hear(shim: socket.socket) -> list[str]:
    """The words that the shim has sent; none: it is gone."""
    try:
        return shim.recv(4096).decode().split()
    except ConnectionError:
        return []


def become_reaper() -> None:
    """Have orphans among our descendants become our children, so that none gets away (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children() -> None:
    """Kill all our descendants: whose parent dies becomes our child, until there is none."""
    while True:
        for child in children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                time.sleep(0.002)
        except ChildProcessError:
            return


def children() -> list[int]:
    """Our children now, dead ones that nobody has reaped included."""
    found, own = [], os.getpid()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # The name of the program may hold spaces and brackets; the parent is second behind it.
                if int(file.read().rpartition(b")")[2].split()[1]) == own:
                    found.append(int(name))
    return found


def take_plan(path: str) -> dict[str, Any]:
    with open(path, encoding="utf-8") as file:
        plan: dict[str, Any] = json.load(file)
    os.unlink(path)
    return plan


if __name__ == "__main__":
    sys.exit(main(take_plan(sys.argv[1])))
