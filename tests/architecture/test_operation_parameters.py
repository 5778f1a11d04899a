"""Operation bodies use the parameters that they declare, and read no inputs from the call context."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import falaj
from falaj.control.services import all_operations
from falaj.governance.operations.operation import Operation

SOURCE = Path(falaj.__file__).parent
BY_THE_GATE = {"sources": None, "views": "endpoints.record"}
"""Parameters that the gate itself uses, for lineage and labels; of all operations, or of the named one."""


@pytest.mark.parametrize("op", all_operations().values(), ids=all_operations().keys())
def test_an_operation_uses_the_parameters_that_it_declares(op: Operation) -> None:
    assert unused(op) == set()


def test_inputs_are_not_fetched_from_the_context_of_a_call() -> None:
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if "governance" not in path.parts and "call.given" in path.read_text()
    }

    assert found == set()


def unused(op: Operation) -> set[str]:
    """Return the parameters that the body does not use, except those that the gate resolves."""
    by_the_gate = {name for name, only in BY_THE_GATE.items() if only in (None, op.name)}
    resolved = {op.subject, *op.placements} | by_the_gate
    return set(op.parameters) - resolved - set(names_used(op))


def names_used(op: Operation) -> Iterator[str]:
    """Return the names that the body reads, and the references that it resolves through the call."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(op.body))).body
    assert isinstance(function, ast.FunctionDef)
    for node in (each for statement in function.body for each in ast.walk(statement)):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                yield name
            case ast.Call(func=ast.Attribute(attr="object"), args=[ast.Constant(value=str(name))]):
                yield name
            case ast.Subscript(value=ast.Attribute(attr="referred"), slice=ast.Constant(value=str(name))):
                yield name
            case _:
                pass
