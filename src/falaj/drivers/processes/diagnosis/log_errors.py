"""Finds exceptions and reports of torchrun and horovodrun in the end of a log. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

TRACEBACK = "Traceback (most recent call last):"
GROUP_TRACEBACK = "Exception Group Traceback (most recent call last):"
GROUP_MARGIN = re.compile(r"^[ |+-]*(?=[A-Za-z_])")
RANK_PREFIX = re.compile(r"^\[(?:(?:rank|default)(?=\d+\]:)|(?=\d+\]<std))(\d+)\](?:<std(?:out|err)>)?:\s?")
"""The prefixes that torchrun and horovodrun add to lines."""
HOROVOD_REPORT = re.compile(r"The first process to do so was:\nProcess name: (\d+)\nExit code: (\d+)")
BARE_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt)(?:: .*)?$")
LAUNCHER_ERRORS = (
    "torch.distributed.elastic.",
    "torch.distributed.DistNetworkError",
    "RuntimeError: Horovod detected",
)
TORCHRUN_REPORT = re.compile(r"ChildFailedError:?\s*$|^Failures:$|^Root Cause \(first observed failure\):$")
TORCHRUN_FIELD = re.compile(r"^  (rank|exitcode)\s*: (-?\d+)")
TERMINATED = -15
SYMPTOMS = re.compile(
    r"Connection (?:closed|reset|refused)|closed by peer|Broken pipe|[Tt]imed? ?out|NCCL|[Gg]loo|TCPStore"
    r"|DistBackendError|DistNetworkError|DistStoreError|EOFError|recvBytes|heartbeat"
)
"""Errors of a rank whose peer has ended: symptoms, not causes."""


class RankExit(NamedTuple):
    """How one rank ended."""

    rank: int | None
    exit_code: int | None
    signal: int | None


def failed_rank(framework: str, text: str) -> RankExit | None:
    """Return the failed rank that a launcher of ranks reports."""
    if framework == "torch":
        return failed_rank_of_torchrun(text)
    report = HOROVOD_REPORT.search(text) if framework == "horovod" else None
    if report is None:
        return None
    rank, status = int(report[1]), int(report[2])
    return RankExit(rank, None, status - 128) if status > 128 else RankExit(rank, status, None)


def failed_rank_of_torchrun(text: str) -> RankExit | None:
    """Return the likely culprit that torchrun reports: the first it noticed need not be the first that died."""
    deaths = torchrun_failures(text)
    if not deaths:
        return None
    marked = lines_by_rank(text)

    def weight(status: tuple[int, int]) -> int:
        rank, code = status
        said = last_exception(marked.get(rank, []))
        if code < 0 and code != TERMINATED:
            return 0
        if said and not SYMPTOMS.search(said):
            return 1
        return 3 if code == TERMINATED else 2

    rank, code = min(deaths, key=weight)
    return RankExit(rank, None, -code) if code < 0 else RankExit(rank, code, None)


def torchrun_failures(text: str) -> list[tuple[int, int]]:
    """Return rank and status of each failure in the report, the root cause that it names first."""
    lines = text.splitlines()
    found, rank, is_root = list[tuple[int, int]](), None, False
    in_report = False
    for line in lines:
        if TORCHRUN_REPORT.search(line):
            in_report, is_root = True, line.startswith("Root Cause")
        entry = TORCHRUN_FIELD.match(line) if in_report else None
        if entry and entry[1] == "rank":
            rank = int(entry[2])
        elif entry and rank is not None:
            found.insert(0 if is_root else len(found), (rank, int(entry[2])))
            rank = None
    return found


def lines_by_rank(text: str) -> dict[int, list[str]]:
    """Return the lines that are prefixed by a rank."""
    found: dict[int, list[str]] = {}
    for line in text.splitlines():
        if prefix := RANK_PREFIX.match(line):
            found.setdefault(int(prefix[1]), []).append(line[prefix.end() :])
    return found


def exception_line(text: str, *, rank: int | None) -> str:
    """Return the last exception of user code in the log; that of `rank` if lines are prefixed by ranks."""
    lines, marked = text.splitlines(), lines_by_rank(text)
    if rank is None or not marked:
        return last_exception([RANK_PREFIX.sub("", line) for line in lines])
    own = last_exception(marked.get(rank, []))
    return own or last_exception([line for line in lines if not RANK_PREFIX.match(line)])


def last_exception(lines: Sequence[str]) -> str:
    users = [line for line in exceptions(lines) if not line.startswith(LAUNCHER_ERRORS)]
    return users[-1] if users else ""


def exceptions(lines: Sequence[str]) -> Iterable[str]:
    """Yield the last line of each traceback, and bare exceptions such as syntax errors."""
    in_traceback = in_group = False
    for line in lines:
        if line.strip() == TRACEBACK:
            in_traceback = True
        elif line.strip(" +|-") == GROUP_TRACEBACK:
            in_group = True
        elif in_traceback and line and not line[0].isspace():
            in_traceback = False
            yield line
        elif in_group and line.startswith("  | ") and line[4:5].strip():
            in_group = False
            yield GROUP_MARGIN.sub("", line)
        elif BARE_EXCEPTION.match(line):
            yield line


def without_torchrun_report(text: str) -> str:
    """Return the output of the workers, without the report of torchrun."""
    return re.split(r"^[EW]\d{4} .*torch/distributed/elastic", text, maxsplit=1, flags=re.MULTILINE)[0]


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
