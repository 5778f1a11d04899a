"""Rules that keep the tests independent of the load of the machine: waits, clocks and ports."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from polling import PATIENCE_S

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"

PROGRAMS = {
    *("contracts/hostile_code.py", "dataloading_fit.py", "hung_trials.py", "killed_import.py", "load.py"),
    *("misbehaving_parsers.py", "replica_program.py", "scenarios/paused_controller.py"),
    "unit/training/killed_fit.py",
}
"""Files whose code runs in other processes, as a fake job does: they may take their time."""

CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns"}
WAITS = {
    **dict.fromkeys(["wait", "join", "result", "exception", "settimeout", "timeout", "acquire"], 0),
    **dict.fromkeys(["wait_for", "create_connection"], 1),
    **dict.fromkeys(
        ["communicate", "run", "get", "post", "put", "request", "urlopen", "Client", "Barrier"], None
    ),
    **dict.fromkeys(["check_output", "check_call", "set_default_timeout", "wait_for_selector"], None),
    "select": 3,
}
"""Calls that wait, with the position of their limit; each also takes it as `timeout=`."""

Rule = Callable[[ast.Module], Iterator[ast.AST]]


def sleeps(tree: ast.Module) -> Iterator[ast.AST]:
    """Sleeps: `eventually` waits for a condition, and `let_pass` says that it waits for none."""
    for call in calls(tree):
        if name_of(call) in ("sleep", "wait_for_timeout") and not is_number(call.args[0], upto=0):
            yield call


def short_limits(tree: ast.Module) -> Iterator[ast.AST]:
    """Limits of waits that are numbers below PATIENCE_S; a loop that looks now and then may pause for one."""
    pacing = {
        id(part) for loop in ast.walk(tree) if isinstance(loop, ast.While) for part in ast.walk(loop.test)
    }
    for call in calls(tree):
        if id(call) in pacing or name_of(call) not in WAITS or is_mark(call):
            continue
        at = WAITS[name_of(call)]
        given = [each.value for each in call.keywords if each.arg == "timeout"]
        given += [] if at is None else call.args[at : at + 1]
        if any(is_number(each, above=0, upto=PATIENCE_S - 1) for each in given):
            yield call


def elapsed_times(tree: ast.Module) -> Iterator[ast.AST]:
    """Assertions on the time between two looks at a clock; CPU time may be compared."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from elapsed_times_in(function)


def elapsed_times_in(function: ast.AST) -> Iterator[ast.AST]:
    looks = names_bound_to(function, reads_clock)

    def is_difference(node: ast.AST) -> bool:
        return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and all(
            any(reads_clock(part) or is_name(part, looks) for part in ast.walk(side))
            for side in (node.left, node.right)
        )  # fmt: skip

    differences = names_bound_to(function, lambda node: any(is_difference(part) for part in ast.walk(node)))
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) and any(
            is_difference(part) or is_name(part, differences) for part in ast.walk(node.test)
        ):
            yield node


def fixed_ports(tree: ast.Module) -> Iterator[ast.AST]:
    """Ports that are numbers where something listens or connects: another program may have them."""
    for call in calls(tree):
        if name_of(call) not in ("bind", "connect", "connect_ex", "create_server", "create_connection"):
            continue
        for address in call.args[:1]:
            if isinstance(address, ast.Tuple) and is_number(address.elts[1], above=0):
                yield call


@pytest.mark.parametrize("rule", [sleeps, short_limits, elapsed_times, fixed_ports])
def test_no_test_depends_on_the_load_of_the_machine(rule: Rule) -> None:
    broken = [
        f"{path.relative_to(TESTS)}:{found.lineno} {ast.unparse(found)[:80]}"
        for path in sorted(TESTS.rglob("*.py"))
        if path.relative_to(TESTS).as_posix() not in PROGRAMS | {"polling.py"}
        for found in rule(parsed(path))
    ]

    assert broken == [], rule.__doc__


def test_the_list_of_programs_names_files_that_exist() -> None:
    assert [name for name in PROGRAMS if not (TESTS / name).is_file()] == []


def test_a_wait_fails_before_its_test_is_ended() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]

    assert settings["timeout"] > 2 * PATIENCE_S


BREACHES = {
    "time.sleep(0.1)": sleeps,
    "await asyncio.sleep(wait_s)": sleeps,
    "page.wait_for_timeout(500)": sleeps,
    "process.wait(20)": short_limits,
    "assert process.wait(timeout=5) == 0": short_limits,
    "subprocess.run(command, timeout=60)": short_limits,
    "select.select([pipe], [], [], 0.5)": short_limits,
    "began = time.monotonic()\nassert time.monotonic() - began < 5": elapsed_times,
    "began = perf_counter()\ntook = perf_counter() - began\nassert took < 5": elapsed_times,
    "socket.create_server(('127.0.0.1', 8080))": fixed_ports,
}
KEPT = [
    "await asyncio.sleep(0)",
    "process.wait(PATIENCE_S)",
    "while not over.wait(0.1): ask()",
    "select.select([pipe], [], [], 0)",
    "words = ', '.join(['a'])",
    "began = time.process_time()\nassert time.process_time() - began < 5",
    "now = time.time() + ahead_s\nassert now - ahead_s <= ended_at",
    "socket.create_server(('127.0.0.1', 0))",
]


@pytest.mark.parametrize("code", BREACHES)
def test_a_breach_is_found(code: str) -> None:
    assert [*BREACHES[code](in_function(code))]


@pytest.mark.parametrize("code", KEPT)
def test_what_does_not_depend_on_load_is_allowed(code: str) -> None:
    assert [found for rule in {*BREACHES.values()} for found in rule(in_function(code))] == []


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def in_function(code: str) -> ast.Module:
    indented = code.replace("\n", "\n    ")
    return ast.parse(f"async def test() -> None:\n    {indented}\n")


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def is_mark(call: ast.Call) -> bool:
    return ast.unparse(call.func).startswith("pytest.mark.")


def is_name(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def is_number(node: ast.AST, *, above: float = -1, upto: float = float("inf")) -> bool:
    return (
        isinstance(node, ast.Constant) and isinstance(node.value, int | float) and above < node.value <= upto
    )


def reads_clock(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and name_of(node) in CLOCKS


def names_bound_to(function: ast.AST, is_wanted: Callable[[ast.AST], bool]) -> set[str]:
    """Return the names that are assigned a value in which something is wanted."""
    return {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and any(is_wanted(part) for part in ast.walk(node.value))
        for target in node.targets
        if isinstance(target, ast.Name)
    }
