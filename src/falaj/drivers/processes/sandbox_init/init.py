"""The init process inside the sandbox: starts the ranks, forwards a stop to them, and leaves no process behind.

Its source text is passed to a Python in the sandbox, where Falaj is not installed: standard library only. It is
connected to the supervisor by a socket. It sends "running", the cgroup that it asks to be moved to, and how the ranks
ended; it receives "entered", "stacks", "term" and "kill". If the stream ends, the supervisor is gone and the ranks end.
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
PR_SET_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
FREEZE_PASSES = 100
STACK_SIGNAL_OFFSET = 11  # above SIGRTMIN, as the hook registers it
DUMP_TIMEOUT_S = 5.0
STACK_TIMEOUT_S = 1.0
STACK_LIMIT_BYTES = 64 * 1024
MAX_STACKS = 64
RANK_VARIABLES = (
    b"FALAJ_RANK",
    b"RANK",
    b"HOROVOD_RANK",
    b"OMPI_COMM_WORLD_RANK",
    b"PMI_RANK",
    b"JAX_PROCESS_ID",
)


class Gang:
    """Ranks that start and end together."""

    def __init__(self, plan: dict[str, Any], channel: SupervisorChannel) -> None:
        self._plan = plan
        self._channel = channel
        self._ranks: dict[int, int] = {}  # pid -> rank
        self._started: list[subprocess.Popen[bytes]] = []
        self._kill_at: float | None = None
        self._tolerated_losses: int = plan.get("tolerated_losses", 0)
        self.ended: dict[str, int | None] | None = None
        """Rank, exit code and signal of the first rank that failed, or of the last that ended."""

    @property
    def is_over(self) -> bool:
        return not self._ranks

    @property
    def patience_s(self) -> float | None:
        """The time until the ranks are killed; none while they may run."""
        return None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())

    def start(self) -> None:
        for rank, each in enumerate(self._plan["ranks"]):
            self._channel.enter(f"rank-{rank}")
            try:
                process = subprocess.Popen(
                    each["command"],
                    cwd=self._plan["folder"],
                    env={**os.environ, **each["environment"]},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    preexec_fn=self._limit,
                )
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                print(f"{each['command'][0]}: {error}", file=sys.stderr, flush=True)
                self._record_exit(rank, COULD_NOT_START, None)
                if self.ended is not None:
                    return
                continue  # the attempt tolerates the loss
            self._started.append(process)
            self._ranks[process.pid] = rank
        self._channel.enter("init")

    def _limit(self) -> None:
        for name, limit in self._plan["limits"].items():
            number = getattr(resource, name)
            hard = resource.getrlimit(number)[1]
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(number, (limit, limit))

    def dump_stacks(self) -> None:
        """Print the stack of every process to the log."""
        known = {} if self._plan["is_launcher"] else self._ranks
        dump_stacks(os.path.join(self._plan["heartbeat"], "stacks"), known)

    def reap(self) -> None:
        """Record every process that has ended. The first failure terminates the others."""
        ended = [(self._ranks.pop(pid), status) for pid, status in reap_children() if pid in self._ranks]
        for rank, status in sorted(ended, key=lambda each: not self._is_essential(each[0])):
            if os.WIFSIGNALED(status):
                self._record_exit(rank, None, os.WTERMSIG(status))
            else:
                self._record_exit(rank, os.WEXITSTATUS(status), None)
        if self._ranks and self._has_essential and not self._essential_pids():
            self.kill()  # parameter servers, for example, never end by themselves

    def _record_exit(self, rank: int, exit_code: int | None, killed_by: int | None) -> None:
        if not self._is_essential(rank) and (
            exit_code == 0 or (self._has_essential and not self._essential_pids())
        ):
            return
        if (
            exit_code != 0
            and self._tolerated_losses > 0
            and self._is_essential(rank)
            and self._essential_pids()
        ):
            self._tolerate_loss(
                rank, f"exit code {exit_code}" if killed_by is None else f"signal {killed_by}"
            )
            return
        failed_before = self.ended is not None and self.ended["exit_code"] != 0
        if not failed_before:
            self.ended = {"rank": rank, "exit_code": exit_code, "signal": killed_by}
        if exit_code != 0 and not failed_before:
            self.terminate()
            self._kill_at = time.monotonic() + self._plan["grace_s"]

    def _tolerate_loss(self, rank: int, how: str) -> None:
        """Continue without a rank, and kill the processes that it left behind."""
        self._tolerated_losses -= 1
        print(
            f"falaj: {self._plan['ranks'][rank]['name']} was lost ({how}); the others continue",
            file=sys.stderr,
        )
        sys.stderr.flush()
        for orphan in set(children()) - set(self._ranks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)

    def _is_essential(self, rank: int) -> bool:
        """Return whether the attempt runs as long as this rank does."""
        return bool(self._plan["ranks"][rank].get("is_essential", True))

    @property
    def _has_essential(self) -> bool:
        """Whether the end of this machine decides. Else it runs until it is stopped: the end of another one decides."""
        return any(self._is_essential(rank) for rank in range(len(self._plan["ranks"])))

    def _essential_pids(self) -> list[int]:
        return [pid for pid, rank in self._ranks.items() if self._is_essential(rank)]

    def terminate(self) -> None:
        """Send SIGTERM to the essential ranks. They may need the others to save their state."""
        self._tolerated_losses = 0
        self._send(signal.SIGTERM, self._essential_pids())

    def kill(self) -> None:
        self._kill_at = None
        self._send(signal.SIGKILL, list(self._ranks))

    def _send(self, number: int, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)


def main(plan: dict[str, Any]) -> int:
    become_subreaper()
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which ranks would inherit
    with socket.socket(socket.AF_UNIX) as supervisor:
        supervisor.connect(plan["socket"])
        outlive_parent()
        channel = SupervisorChannel(supervisor, is_limited=plan["is_limited"])
        channel.send({"running": True})
        gang = Gang(plan, channel)
        gang.start()
        wait_for_ranks(gang, channel, wake)
        kill_descendants()
        ended = gang.ended or {"rank": 0, "exit_code": None, "signal": signal.SIGKILL}
        channel.send(ended)
    code = ended["exit_code"]
    return code if code is not None else 128 + (ended["signal"] or 0)


class SupervisorChannel:
    """The connection to the supervisor."""

    def __init__(self, supervisor: socket.socket, *, is_limited: bool) -> None:
        self._supervisor = supervisor
        self._is_limited = is_limited
        self.commands: list[str] = []
        """Commands that were received and not yet executed."""
        self.is_open = True

    def fileno(self) -> int:
        return self._supervisor.fileno()

    def send(self, what: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._supervisor.sendall(json.dumps(what).encode() + b"\n")

    def receive(self) -> None:
        try:
            said = self._supervisor.recv(4096).decode().split()
        except ConnectionError:
            said = []
        self.is_open = bool(said)
        self.commands += said

    def enter(self, leaf: str) -> None:
        """Move to another cgroup, if cgroups are used. Processes that are started afterwards belong to it."""
        if not self._is_limited:
            return
        self.send({"enter": leaf})
        while self.is_open and "entered" not in self.commands:
            self.receive()
        if self.is_open:
            self.commands.remove("entered")


def wait_for_ranks(gang: Gang, channel: SupervisorChannel, wake: int) -> None:
    """Reap ranks and execute commands of the supervisor until all ranks have ended."""
    gang.reap()
    while not gang.is_over:
        run_commands(gang, channel)
        ready, _, _ = select.select([channel.fileno(), wake], [], [], gang.patience_s)
        if not ready:
            gang.kill()
        if wake in ready:
            os.read(wake, 4096)
        if channel.fileno() in ready:
            channel.receive()
            if not channel.is_open:
                gang.kill()
                return
            run_commands(gang, channel)
        gang.reap()


def run_commands(gang: Gang, channel: SupervisorChannel) -> None:
    commands, channel.commands = channel.commands, []
    if "stacks" in commands:
        gang.dump_stacks()
    if "term" in commands:
        gang.terminate()
    if "kill" in commands:
        gang.kill()


def reap_children() -> list[tuple[int, int]]:
    """Return pid and status of the children that have ended since the last call, orphans included."""
    found = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            found.append((pid, status))
    return found


def become_subreaper() -> None:
    """Make orphaned descendants our children, so that none escapes (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def outlive_parent() -> None:
    """Undo that the sandbox kills us with the shim: the stream ends then, and the ranks must be ended first."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, 0, 0, 0, 0)


def kill_descendants() -> None:
    """Kill all our descendants. Orphans become our children, until there are none."""
    pause_s = 0.002
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            for each in stop_descendants():
                send_signal(each, signal.SIGKILL)
            time.sleep(pause_s)
            pause_s = min(0.1, 2 * pause_s)  # a process that waits for a device may take minutes


def stop_descendants() -> set[int]:
    """Stop all our descendants, so that none forks while they are killed, and return them."""
    frozen = set[int]()
    for _ in range(FREEZE_PASSES):
        new = set(descendants()) - frozen
        for each in new:
            send_signal(each, signal.SIGSTOP)
        frozen |= new
        if not new:
            break
    return frozen


def send_signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def descendants() -> list[int]:
    """Return all our descendants, zombies included; parents before their children."""
    below, found, waiting = children_by_parent(), [], [os.getpid()]
    while waiting:
        new = sorted(below.pop(waiting.pop(0), []))
        found += new
        waiting += new
    return found


def children_by_parent() -> dict[int, list[int]]:
    """Return the children of each process."""
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                # The program name may contain spaces and brackets; the parent is the second field after it.
                parent = int(file.read().rpartition(b")")[2].split()[1])
                found.setdefault(parent, []).append(int(name))
    return found


def children() -> list[int]:
    """Return our children, zombies included."""
    return children_by_parent().get(os.getpid(), [])


def dump_stacks(path: str, known: dict[int, int]) -> None:
    """Print the stack of each of our descendants, with its rank."""
    deadline = time.monotonic() + DUMP_TIMEOUT_S
    for pid in descendants()[:MAX_STACKS]:
        rank = known.get(pid, rank_of(pid))
        who = "a process" if rank is None else f"rank {rank}"
        stack = python_stack(pid, path) if time.monotonic() < deadline else b""
        header = f"[falaj: {who}, process {pid}: {command_line(pid)}]\n".encode()
        os.write(2, b"\n" + header + (stack or kernel_stack(pid)) + b"\n")


def rank_of(pid: int) -> int | None:
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/environ", "rb") as file:
        variables = dict(each.partition(b"=")[::2] for each in file.read().split(b"\0"))
        return next((int(variables[name]) for name in RANK_VARIABLES if name in variables), None)
    return None


def python_stack(pid: int, path: str) -> bytes:
    """Return the stacks that a Python process with the hook dumps; empty if it has no hook or does not respond."""
    number = signal.SIGRTMIN + STACK_SIGNAL_OFFSET
    if not has_handler(pid, number):
        return b""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        send_signal(pid, number)
        deadline, stack = time.monotonic() + STACK_TIMEOUT_S, b""
        while time.monotonic() < deadline and len(stack) < STACK_LIMIT_BYTES:
            new = file.read(STACK_LIMIT_BYTES)
            stack += new
            if stack and not new:
                break
            time.sleep(0.03)
        return stack
    return b""


def has_handler(pid: int, number: int) -> bool:
    """Return whether a process handles a signal, which would otherwise kill it."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith(b"SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def kernel_stack(pid: int) -> bytes:
    """Return the kernel's view of a process that cannot dump its stack."""
    stack = b""
    for name in ("wchan", "stack"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
            stack += b"  " + name.encode() + b": " + file.read(4096).strip() + b"\n"
    return stack or b"  (unknown)\n"


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read(200).replace(b"\0", b" ").decode(errors="replace").strip().replace("\n", " ")
    return "?"


def load_plan(path: str) -> dict[str, Any]:
    with open(path, encoding="utf-8") as file:
        plan: dict[str, Any] = json.load(file)
    os.unlink(path)
    return plan


if __name__ == "__main__":
    sys.exit(main(load_plan(sys.argv[1])))
