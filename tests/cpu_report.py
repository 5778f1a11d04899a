"""What tests cost: CPU seconds by folder, by fixture and by process started. `--cpu-report` prints them at the end.

A process counts when it is waited for, with those that it waited for itself; one that outlives its parent does not.
"""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

PROPERTY = "cpu_seconds"
LINES = 15
"""How many folders, fixtures and processes are printed, the most expensive first."""
ROOT = Path(__file__).parents[1]

_fixtures = Counter[str]()
_processes = Counter[str]()
_inner: list[float] = []
"""For each fixture that is being made: what the fixtures cost that it asked for."""
_began = 0.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-report", action="store_true", help="print CPU seconds by folder, fixture and process"
    )


# ---------------------------------------------------------------------------- in the process that runs tests


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    global _began
    _began = cpu_seconds()
    _fixtures.clear()
    _processes.clear()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
    before = cpu_seconds()
    _inner.append(0.0)
    try:
        return (yield)
    finally:
        cost = cpu_seconds() - before
        _fixtures[f"{fixturedef.argname} ({fixturedef.scope})"] += cost - _inner.pop()
        if _inner:
            _inner[-1] += cost


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "teardown":
        cost = {
            "slow": item.get_closest_marker("slow") is not None,
            "folder": item.path.parent.relative_to(ROOT).as_posix(),
            "total": cpu_seconds() - _began,
            "fixtures": dict(_fixtures),
            "processes": dict(_processes),
        }
        report.user_properties.append((PROPERTY, cost))
    return report


def count_process(arguments: object, wait: Callable[[], T]) -> T:
    """Return what `wait` returns, and count what the processes cost that ended meanwhile."""
    before = cpu_seconds_of_children()
    try:
        return wait()
    finally:
        _processes[process_name(arguments)] += cpu_seconds_of_children() - before


def process_name(arguments: object) -> str:
    """Return a short name of a command: the program, and for Python the module or script."""
    if isinstance(arguments, str | bytes | os.PathLike) or not isinstance(arguments, Sequence):
        return Path(os.fsdecode(arguments)).name if isinstance(arguments, str | bytes | os.PathLike) else "?"
    words = [os.fsdecode(word) for word in arguments]
    program = Path(words[0]).name
    if program.startswith("python"):
        words = [
            "python",
            *(word for word in words[1:] if word not in ("-u", "-I", "-s", "-S", "-P", "-m", "-B")),
        ]
        shown = words[1 : 4 if words[1:2] == ["falaj"] else 3 if words[1:2] == ["-c"] else 2]
        return " ".join(["python", *(Path(word).name.strip().partition("\n")[0][:60] for word in shown)])
    return " ".join([program, *words[1:2]]) if program == "falaj" else program


def cpu_seconds() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime + cpu_seconds_of_children()


def cpu_seconds_of_children() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


# ------------------------------------------------------------------------------- in the process that reports


class Ledger:
    """The sums of all tests."""

    def __init__(self) -> None:
        self.folders, self.fixtures, self.processes = Counter[str](), Counter[str](), Counter[str]()
        self.parts = Counter[str]()

    def add(self, cost: dict[str, Any]) -> None:
        self.parts["slow" if cost["slow"] else "quick"] += cost["total"]
        self.folders[cost["folder"]] += cost["total"]
        self.fixtures.update(cost["fixtures"])
        self.processes.update(cost["processes"])


_ledger = Ledger()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name, value in report.user_properties:
        if name == PROPERTY and report.when == "teardown":
            _ledger.add(value)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.getoption("--cpu-report"):
        return
    write = terminalreporter.write_line
    terminalreporter.section("CPU seconds")
    write(", ".join(f"{part} tests {seconds:,.0f}" for part, seconds in sorted(_ledger.parts.items())))
    for title, costs in (
        ("by folder", _ledger.folders),
        ("by fixture", _ledger.fixtures),
        ("by process started", _ledger.processes),
    ):
        write(f"{title}:")
        for name, seconds in costs.most_common(LINES):
            write(f"  {seconds:>8,.1f}  {name}")
