"""Says in one sentence why an attempt did not go well, from how it ended and the end of its log. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from falaj.drivers.processes.disk import words
from falaj.drivers.processes.frameworks import name_of
from falaj.drivers.processes.speech import (
    Death,
    before_torchrun,
    blamed_by_starter,
    exception_line,
    last_line,
)
from falaj.drivers.processes.stacks import crashed_at, explain_hang
from falaj.drivers.processes.stopping import Cause
from falaj.ports.launcher import Launch

LONGEST = 300
SIGNALLED = 128
UNPRINTABLE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[^\x20-\x7e\u00a0-\U0010ffff]")


@dataclass
class Ended:
    """How an attempt ended. `refused` says why it was not started; `began` is False where the walls failed.

    `why` says why we stopped it; `silent` and `told` are of a hang: the ranks that were silent, and what was printed
    when they were asked where they stood. `killed_for_memory` are the ranks of which the kernel killed something,
    `refused_tasks` is how often it refused a process, both by the attempt's cgroup; `out_of_memory` is of the machine.
    `process_memory_bytes` is what each process could have, where no cgroup held them together.
    """

    rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    cause: Cause | None = None
    why: str | None = None
    refused: str | None = None
    out_of_memory: bool = False
    began: bool = True
    silent: Sequence[int] = ()
    told: bytes = b""
    killed_for_memory: Sequence[int] = ()
    refused_tasks: int = 0
    process_memory_bytes: int | None = None


def explain(ended: Ended, launch: Launch, tail: bytes) -> str | None:
    """None where it went well."""
    if ended.exit_code == 0:
        return None
    if ended.refused is not None:
        return sentence(f"It could not be started: {' '.join(ended.refused.split())}")
    text = tail.decode("utf-8", errors="replace")
    if ended.cause is not None:
        return sentence(stopped(ended, launch))
    if not ended.began:
        return sentence(f"Its sandbox did not start: {last_line(text) or how(ended.exit_code, None)}")
    death, name = Death(ended.rank, ended.exit_code, ended.signal), name_in(launch, ended.rank)
    blamed = blamed_by_starter(launch.framework, text)
    if blamed is not None:
        death, name = blamed, f"rank {blamed.rank}"
    why = exception_line(text, rank=death.rank if blamed or name else None)
    what = how(death.exit_code, death.signal) + detail(ended, death, launch, why, text)
    if not why and not death.signal:
        why = last_line(before_torchrun(text))
    who = f"{name}: " if name and launch.processes > 1 else ""
    return sentence(f"{who}{what}{': ' + why if why else ''}")


def stopped(ended: Ended, launch: Launch) -> str:
    """Why we ended it ourselves; what it made of that does not matter."""
    if ended.cause == "timeout":
        return f"It was stopped after {launch.timeout_s:g} s, its time limit"
    if ended.cause == "hung":
        told = ended.told.decode("utf-8", errors="replace")
        return explain_hang(ended.silent, hang_s=launch.hang_s or 0, text=told, processes=launch.processes)
    if ended.cause == "fault":
        return ended.why or "It was stopped"
    return f"It was stopped on request: {how(ended.exit_code, ended.signal)}"


def name_in(launch: Launch, rank: int | None) -> str:
    """What people call a process that we started; empty for one that starts the ranks itself."""
    return "" if rank is None else name_of(launch, rank)


def how(exit_code: int | None, number: int | None) -> str:
    if number is not None:
        return f"killed by {signal_name(number)}"
    if (
        exit_code is not None
        and exit_code > SIGNALLED
        and signal_name(exit_code - SIGNALLED).startswith("SIG")
    ):
        return f"exit code {exit_code} (something that it ran was killed by {signal_name(exit_code - SIGNALLED)})"
    return f"exit code {exit_code}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def detail(ended: Ended, death: Death, launch: Launch, why: str, text: str) -> str:
    """What is known beyond the exit code: whose limit it met, and where it stood."""
    if ended.killed_for_memory:
        return out_of_memory(ended.killed_for_memory, death, launch)
    if ended.out_of_memory:
        return "; the machine ran out of memory"
    if ended.process_memory_bytes is not None and why.startswith("MemoryError"):
        return f" (out of memory: each process may have {words(ended.process_memory_bytes)})"
    if launch.disk_bytes is not None and (death.signal == signal.SIGXFSZ or "[Errno 27]" in why):
        return f" (its disk quota: no file may have more than {words(launch.disk_bytes)})"
    if ended.refused_tasks and "[Errno 11]" in why:
        return " (it started too many processes)"
    where = crashed_at(text) if death.signal is not None else ""
    return f" {where}" if where else ""


def out_of_memory(ranks: Sequence[int], death: Death, launch: Launch) -> str:
    whose = "all processes together" if launch.processes > 1 else "it"
    limit = "" if launch.memory_bytes is None else f": {whose} may have {words(launch.memory_bytes)}"
    others = [rank for rank in ranks if rank != death.rank]
    if others and launch.processes > 1 and launch.framework != "torch":
        return f"; rank {', '.join(map(str, others))} ran out of memory{limit}"
    return f"; it ran out of memory{limit}"


def sentence(said: str) -> str:
    """One printable line of bounded length: what the user's code printed goes to other people's screens."""
    clean = UNPRINTABLE.sub("", said).strip()
    clean = clean if len(clean) <= LONGEST else clean[: LONGEST - 1] + "…"
    return clean[:1].upper() + clean[1:]
