"""A page of records as a table of its own, and the command that shows the next one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from falaj.apps.cli import reading
from falaj.apps.cli.printing import show
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations


def show_page(
    session: Session, name: str, typed: Mapping[str, Any], table: Callable[[tuple[Any, ...]], None]
) -> None:
    """Perform the listing operation `name` with what was `typed`, and print what it found by `table`."""
    operation = all_operations()[name]
    given = reading.gather(operation, typed)
    reading.check(operation, given)
    with session.platform() as platform:
        found = getattr(getattr(platform, operation.group), operation.body.__name__)(**given)
    if session.json or not found.items:
        show(found, as_json=session.json)
        return
    table(found.items)
    if found.next:
        following = reading.retype(operation, given, after=found.next)
        print(f"there are more: {session.spell(following)}", file=sys.stderr)
