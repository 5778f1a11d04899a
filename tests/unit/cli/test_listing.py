"""`--all` lists every page of every list."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import falaj as fj
from command_line import CommandLine, command_line, make_template
from falaj.apps.cli.generation import operations
from falaj.apps.cli.generation.operations import command_for
from falaj.control.services import all_operations
from falaj.records.governance.objects import Page


@pytest.fixture
def falaj(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[CommandLine]:
    monkeypatch.setattr(operations, "LARGEST_PAGE", 4)
    make_template(tmp_path)
    with command_line(tmp_path, capsys) as line:
        with fj.open(line.home) as platform:
            for number in range(10):
                platform.runs.start("listed", name=f"run-{number}")
        yield line


def test_all_lists_every_page(falaj: CommandLine) -> None:
    shown = falaj.done("runs", "list", "listed", "--all").out
    found = falaj.json("runs", "list", "listed", "--all")

    assert all(f"run-{number}" in shown for number in range(10))
    assert [run["name"] for run in found["items"]] == [f"run-{number}" for number in reversed(range(10))]
    assert found["next"] is None


def test_all_goes_on_from_a_cursor_and_by_numbers(falaj: CommandLine) -> None:
    first = falaj.json("runs", "list", "listed", "--limit", "3")

    rest = falaj.json("runs", "list", "listed", "--all", "--after", first["next"])
    entries = falaj.json("audit", "list", "--all", "--action", "runs.start")

    assert len(rest["items"]) == 7
    assert len(entries["items"]) == 10


def test_a_list_of_nothing_is_a_page_of_nothing(falaj: CommandLine) -> None:
    assert falaj.json("models", "list", "--all") == {"items": [], "next": None}


def test_every_list_has_the_option() -> None:
    for operation in all_operations().values():
        result = operation.signature.return_annotation
        lists = isinstance(result, type) and issubclass(result, Page) and "limit" in operation.parameters
        options = command_for(operation).__signature__.parameters  # type: ignore[attr-defined]
        assert ("all_pages" in options) == lists, operation.name
