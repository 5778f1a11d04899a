"""`falaj lineage show`: what came from what, as a tree."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.output.results import show_json_lines
from falaj.apps.cli.output.values import encodable
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations


def show(
    session: Session,
    object: Annotated[str, typer.Argument(metavar="OBJECT", help="An id, or kind:name.")],
    *,
    direction: Annotated[
        str | None,
        typer.Option(metavar="DIRECTION", help="Only what it came from (up), or what came from it (down)."),
    ] = None,
    depth: Annotated[str | None, typer.Option(metavar="DEPTH", help=arguments.HELP["depth"])] = None,
) -> None:
    """Draw what an object came from and what came from it, as a tree."""
    graph = all_operations()["lineage.graph"]
    given = parsing.parse(graph, {"object": object, "direction": direction, "depth": depth})
    parsing.check(graph, given, command="lineage show")
    with session.platform() as platform:
        nodes = platform.lineage.graph(**given)
        if session.json:
            show_json_lines(nodes)
        else:
            print(encodable("\n".join(draw_lineage(list(nodes))), encoding=sys.stdout.encoding))


GROUP_COMMANDS = {"show": show}
