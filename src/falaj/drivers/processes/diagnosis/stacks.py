"""Locates where the ranks of a hung or crashed attempt were, from the stacks in its log. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

HEADER = re.compile(r"^\[falaj: rank (\d+), process \d+\b.*\]$")
FRAME = re.compile(r'^  File "(.+)", line (\d+|\?\?\?) in (.+)$')
COLLECTIVE = re.compile(
    r"(?:all_|_all_|i?)?(?:reduce|gather|scatter|broadcast|barrier|to_all|recv|send|wait|synchronize)\w*"
    r"|monitored_barrier|allreduce|allgather|alltoall|Barrier|Allreduce|Bcast|Allgather|join"
)
INSTALLED_PACKAGES = ("/site-packages/", "/dist-packages/", "<frozen ")
STANDARD_LIBRARY = re.compile(r"/lib(?:64)?/python3[\d.]*/")


class StackFrame(NamedTuple):
    file: str
    line: str
    function: str


def explain_hang(silent_ranks: Sequence[int], *, hang_s: float, text: str, processes: int) -> str:
    """Return which ranks hung and where. Ranks that only waited in a collective are not blamed."""
    frames = parse_stacks(text)
    suspects = [rank for rank in silent_ranks or sorted(frames) if not is_in_collective(frames.get(rank, []))]
    blamed = suspects or list(silent_ranks) or sorted(frames)
    since = f"no sign of life for {hang_s:g} s"
    if processes == 1:
        return f"it hung: {since}{describe_position(frames, blamed[:1] or [0], 'it')}"
    if not blamed:
        return f"it hung: {since} from any rank"
    if len(blamed) == 1:
        return f"rank {blamed[0]} hung: {since}{describe_position(frames, blamed, 'it')}"
    shown = ", ".join(map(str, sorted(blamed)[:8])) + (", …" if len(blamed) > 8 else "")
    return f"ranks {shown} hung: {since}{describe_position(frames, blamed[:1], f'rank {blamed[0]}')}"


def describe_position(frames: dict[int, list[StackFrame]], ranks: Sequence[int], who: str) -> str:
    where = locate(frames.get(ranks[0], []))
    return f"; {who} stood {where}" if where else ""


def locate(frames: Sequence[StackFrame]) -> str:
    """Return the innermost function, and the line of user code that led there."""
    if not frames:
        return ""
    own = next((frame for frame in frames if is_user_code(frame)), frames[0])
    line = f"{os.path.basename(own.file)}:{own.line}"
    function = frames[0].function
    return f"at {line}" if function == "<module>" else f"in {function} ({line})"


def is_user_code(frame: StackFrame) -> bool:
    return not any(part in frame.file for part in INSTALLED_PACKAGES) and not STANDARD_LIBRARY.search(
        frame.file
    )


def is_in_collective(frames: Sequence[StackFrame]) -> bool:
    """Return whether it waits for other ranks: a collective is called below user code."""
    below = list(frames_below_user_code(frames))
    return any(COLLECTIVE.fullmatch(frame.function) for frame in below)


def frames_below_user_code(frames: Sequence[StackFrame]) -> Iterable[StackFrame]:
    for frame in frames:
        if is_user_code(frame):
            return
        yield frame


def parse_stacks(text: str) -> dict[int, list[StackFrame]]:
    """Return the frames of each rank's main thread, innermost first, from the first process of the rank."""
    found: dict[int, list[StackFrame]] = {}
    frames: list[StackFrame] | None = None
    rank: int | None = None
    for line in text.splitlines():
        if header := HEADER.match(line):
            rank, frames = int(header[1]) if int(header[1]) not in found else None, None
        elif rank is not None and line.startswith(
            "Current thread 0x"
        ):  # the main thread, which handles signals
            frames = found[rank] = []
        elif line.startswith("Thread 0x"):
            frames = None
        elif frames is not None and (frame := FRAME.match(line)):
            frames.append(StackFrame(frame[1], frame[2], frame[3]))
    return found


def locate_crash(text: str) -> str:
    """Return where Python was when a signal killed it, from the dump of PYTHONFAULTHANDLER; empty without one."""
    report = text.rpartition("Fatal Python error: ")[2]
    if report == text:
        return ""
    lines = report.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith("Current thread 0x")), None)
    if start is None:
        return ""
    frames = []
    for line in lines[start + 1 :]:
        found = FRAME.match(line)
        if found is None:
            break
        frames.append(StackFrame(found[1], found[2], found[3]))
    return locate(frames)
