"""Says in one sentence why an attempt did not go well, from how it ended and the end of its log. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from falaj.drivers.processes.stopping import Cause
from falaj.ports.launcher import Launch

LONGEST = 300
TRACEBACK = "Traceback (most recent call last):"
RANK_PREFIX = re.compile(r"^\[(?:rank|default)(\d+)\]:\s?")
BARE_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt)(?:: .*)?$")
TORCHRUN_ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL
)
TORCHRUN_OWN = ("torch.distributed.elastic.", "torch.distributed.DistNetworkError")
UNPRINTABLE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[^\x20-\x7e\u00a0-\U0010ffff]")


@dataclass
class Ended:
    """How an attempt ended. `refused` says why it was not started; `began` is False where the walls failed."""

    rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    cause: Cause | None = None
    refused: str | None = None
    out_of_memory: bool = False
    began: bool = True


def explain(ended: Ended, launch: Launch, tail: bytes) -> str | None:
    """None where it went well."""
    if ended.exit_code == 0:
        return None
    if ended.refused is not None:
        return sentence(f"It could not be started: {' '.join(ended.refused.split())}")
    text = tail.decode("utf-8", errors="replace")
    if ended.cause == "timeout":
        return sentence(f"It was stopped after {launch.timeout_s:g} s, its time limit")
    if ended.cause == "stopped":
        return sentence(f"It was stopped on request: {how(ended.exit_code, ended.signal)}")
    if not ended.began:
        return sentence(f"Its sandbox did not start: {last_line(text) or how(ended.exit_code, None)}")
    rank, exit_code, number = ended.rank, ended.exit_code, ended.signal
    found = TORCHRUN_ROOT_CAUSE.search(text) if launch.framework == "torch" else None
    if found:
        rank, status = int(found[1]), int(found[2])
        exit_code, number = (None, -status) if status < 0 else (status, None)
    who = f"rank {rank}: " if rank is not None and launch.processes > 1 else ""
    what = how(exit_code, number)
    if ended.out_of_memory:
        what += "; the machine ran out of memory"
    why = exception_line(text, rank=rank) or ("" if number else last_line(before_torchrun(text)))
    if launch.memory_bytes is not None and why.startswith("MemoryError"):
        what += f" (out of memory: each process may have {launch.memory_bytes / 2**20:.0f} MiB)"
    return sentence(f"{who}{what}{': ' + why if why else ''}")


def how(exit_code: int | None, number: int | None) -> str:
    if number is None:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(number).name}"
    except ValueError:
        return f"killed by signal {number}"


def exception_line(text: str, *, rank: int | None) -> str:
    """The last exception of the user's that was printed; that of `rank` if its lines are marked."""
    marked: list[tuple[int | None, str]] = []
    for line in text.splitlines():
        found = RANK_PREFIX.match(line)
        marked.append((int(found[1]), line[found.end() :]) if found else (None, line))
    own = [line for prefix, line in marked if prefix is not None and prefix == rank]
    return last_exception(own) or last_exception([line for _, line in marked])


def last_exception(lines: Sequence[str]) -> str:
    users = [line for line in exceptions(lines) if not line.startswith(TORCHRUN_OWN)]
    return users[-1] if users else ""


def exceptions(lines: Sequence[str]) -> Iterable[str]:
    """The line that ends each traceback, and a bare one such as a syntax error's."""
    in_traceback = False
    for line in lines:
        if line.strip() == TRACEBACK:
            in_traceback = True
        elif in_traceback and line and not line[0].isspace():
            in_traceback = False
            yield line
        elif BARE_EXCEPTION.match(line):
            yield line


def before_torchrun(text: str) -> str:
    """What the workers said, without torchrun's own account of it."""
    return re.split(r"^[EW]\d{4} .*torch/distributed/elastic", text, maxsplit=1, flags=re.MULTILINE)[0]


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def sentence(words: str) -> str:
    """One printable line of bounded length: what the user's code printed goes to other people's screens."""
    clean = UNPRINTABLE.sub("", words).strip()
    clean = clean if len(clean) <= LONGEST else clean[: LONGEST - 1] + "…"
    return clean[:1].upper() + clean[1:]
