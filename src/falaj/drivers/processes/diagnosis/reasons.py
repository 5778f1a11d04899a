"""Explains in one sentence why an attempt failed, from its exit status and the end of its log. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from falaj.drivers.processes.diagnosis.log_errors import (
    RankExit,
    exception_line,
    failed_rank,
    last_line,
    without_torchrun_report,
)
from falaj.drivers.processes.diagnosis.stacks import explain_hang, locate_crash
from falaj.drivers.processes.frameworks.contracts import process_name
from falaj.drivers.processes.frameworks.process import own_ranks, world_size
from falaj.drivers.processes.supervisor.termination import StopCause
from falaj.ports.launcher import Launch
from falaj.records.sizes import format_size

MAX_LENGTH = 300
SIGNAL_EXIT_BASE = 128
UNPRINTABLE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[^\x20-\x7e\u00a0-\U0010ffff]")


@dataclass
class AttemptOutcome:
    """How an attempt ended. Its ranks are places in the plan of this machine.

    `refused` says why it was not started; `began` is False if the sandbox failed to start. `cause` and `why` say why
    the supervisor stopped it. For a hang, `silent_ranks` had no heartbeat, and `hang_output` holds the dumped stacks.
    `killed_for_memory` are the ranks with OOM kills and `refused_tasks` counts refused processes, both by the attempt's
    cgroup; `out_of_memory` means that the machine ran out of memory. `process_memory_bytes` is the limit of each
    process if there is no cgroup.
    """

    rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    cause: StopCause | None = None
    why: str | None = None
    refused: str | None = None
    out_of_memory: bool = False
    began: bool = True
    silent_ranks: Sequence[int] = ()
    hang_output: bytes = b""
    killed_for_memory: Sequence[int] = ()
    refused_tasks: int = 0
    process_memory_bytes: int | None = None


def explain_failure(ended: AttemptOutcome, launch: Launch, tail: bytes) -> str | None:
    """Return why an attempt failed; none if it succeeded."""
    if ended.exit_code == 0:
        return None
    if ended.refused is not None:
        return to_sentence(f"It could not be started: {' '.join(ended.refused.split())}")
    text = tail.decode("utf-8", errors="replace")
    if ended.cause is not None:
        return to_sentence(explain_stop(ended, launch))
    if not ended.began:
        return to_sentence(
            f"Its sandbox did not start: {last_line(text) or describe_exit(ended.exit_code, None)}"
        )
    rank = None if ended.rank is None else ended.rank + own_ranks(launch).start
    death, name = RankExit(rank, ended.exit_code, ended.signal), process_label(launch, ended.rank)
    blamed = failed_rank(launch.framework, text)
    if blamed is not None:
        death, name = blamed, f"rank {blamed.rank}"
    why = exception_line(text, rank=death.rank if blamed or name else None)
    what = describe_exit(death.exit_code, death.signal) + describe_limit(ended, death, launch, why, text)
    if not why and not death.signal:
        why = last_line(without_torchrun_report(text))
    who = f"{name}: " if name and world_size(launch) > 1 else ""
    return to_sentence(f"{who}{what}{': ' + why if why else ''}")


def explain_stop(ended: AttemptOutcome, launch: Launch) -> str:
    """Return why the supervisor ended it, whatever its exit status is."""
    if ended.cause == "timeout":
        return f"It was stopped after {launch.timeout_s:g} s, its time limit"
    if ended.cause == "hung":
        hang_output = ended.hang_output.decode("utf-8", errors="replace")
        return explain_hang(
            ended.silent_ranks, hang_s=launch.hang_s or 0, text=hang_output, processes=world_size(launch)
        )
    if ended.cause == "fenced":
        return "It was stopped because no controller renewed its lease: another machine may run it now"
    if ended.cause == "fault":
        return ended.why or "It was stopped"
    return f"It was stopped on request: {describe_exit(ended.exit_code, ended.signal)}"


def process_label(launch: Launch, rank: int | None) -> str:
    """Return the name of a process of the plan; empty for a launcher that starts the ranks itself."""
    return "" if rank is None else process_name(launch, rank)


def describe_exit(exit_code: int | None, number: int | None) -> str:
    if number is not None:
        return f"killed by {signal_name(number)}"
    if exit_code is not None and exit_code > SIGNAL_EXIT_BASE:
        name = signal_name(exit_code - SIGNAL_EXIT_BASE)
        if name.startswith("SIG"):
            return f"exit code {exit_code} (a process that it ran was killed by {name})"
    return f"exit code {exit_code}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_limit(ended: AttemptOutcome, death: RankExit, launch: Launch, why: str, text: str) -> str:
    """Return what is known beyond the exit code: the limit that was exceeded, or where it crashed."""
    if ended.killed_for_memory:
        return describe_oom(ended.killed_for_memory, death, launch)
    if ended.out_of_memory:
        return "; the machine ran out of memory"
    if ended.process_memory_bytes is not None and why.startswith("MemoryError"):
        return f" (out of memory: each process may have {format_size(ended.process_memory_bytes)})"
    if launch.disk_bytes is not None and (death.signal == signal.SIGXFSZ or "[Errno 27]" in why):
        return f" (its disk quota: no file may have more than {format_size(launch.disk_bytes)})"
    if ended.refused_tasks and "[Errno 11]" in why:
        return " (it started too many processes)"
    where = locate_crash(text) if death.signal is not None else ""
    return f" {where}" if where else ""


def describe_oom(ranks: Sequence[int], death: RankExit, launch: Launch) -> str:
    whose = "all processes together" if launch.processes > 1 else "it"
    limit = "" if launch.memory_bytes is None else f": {whose} may have {format_size(launch.memory_bytes)}"
    others = [rank for place in ranks if (rank := place + own_ranks(launch).start) != death.rank]
    if others and launch.processes > 1 and launch.framework != "torch":
        return f"; rank {', '.join(map(str, others))} ran out of memory{limit}"
    return f"; it ran out of memory{limit}"


def to_sentence(said: str) -> str:
    """Return one printable line of limited length: output of user code is shown to other people."""
    clean = UNPRINTABLE.sub("", said).strip()
    clean = clean if len(clean) <= MAX_LENGTH else clean[: MAX_LENGTH - 1] + "…"
    return clean[:1].upper() + clean[1:]
