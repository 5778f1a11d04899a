"""`falaj groups`: groups of users, who hold the roles of their groups."""

from __future__ import annotations

from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.output.messages import Given, Message, command_with
from falaj.apps.cli.output.values import format_value
from falaj.records.governance.identity import Group

PRESENTATION = Presentation(columns={Group: ("name", "members", "id")}, lists={"group": "groups list"})


@PRESENTATION.message("groups.create")
def _created(made: Group, given: Given) -> Message:
    return Message(f"group {made.name} is created, empty", (("next", f"groups add {made.name} USER"),))


@PRESENTATION.message("groups.add")
def _added(made: Group, given: Given) -> Message:
    undo = command_with(f"groups remove {made.name}", given["user"])
    return Message(f"{given['user']} is in {made.name}: {format_value(made.members)}", (("undo", undo),))


@PRESENTATION.message("groups.remove")
def _removed(made: Group, given: Given) -> Message:
    undo = command_with(f"groups add {made.name}", given["user"])
    return Message(f"{given['user']} is not in {made.name}: {format_value(made.members)}", (("undo", undo),))
