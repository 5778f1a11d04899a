"""A page of records as a table of its own, and the command that shows the next one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from falaj.apps.cli.generation import parsing
from falaj.apps.cli.output.results import show
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations


def show_page(
    session: Session, name: str, typed: Mapping[str, Any], table: Callable[[tuple[Any, ...]], None]
) -> None:
    """Perform the listing operation `name` with what was `typed`, and print what it found by `table`."""
    operation = all_operations()[name]
    given = parsing.parse(operation, typed)
    parsing.check(operation, given)
    with session.platform() as platform:
        found = getattr(getattr(platform, operation.group), operation.body.__name__)(**given)
    if session.json or not found.items:
        show(found, as_json=session.json)
        return
    table(found.items)
    if found.next:
        following = parsing.unparse(operation, given, after=found.next)
        print(f"there are more: {session.full_command(following)}", file=sys.stderr)
