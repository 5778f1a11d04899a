"""`falaj users`: people and service accounts."""

from __future__ import annotations

from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.output.messages import Given, Message
from falaj.records.governance.identity import Principal

PRESENTATION = Presentation(
    columns={Principal: ("name", "kind", "disabled", "created_at", "id")},
    help={"kind": "user or service."},
    lists={"user": "users list"},
)


@PRESENTATION.message("users.create")
def _created(made: Principal, given: Given) -> Message:
    kind = "user" if made.kind == "user" else "service account"
    return Message(
        f"{kind} {made.name} is created, without any role",
        (
            ("next", f"workspaces grant default {made.name} --role developer"),
            ("next", f"tokens issue --user {made.name} --purpose PURPOSE"),
        ),
    )


@PRESENTATION.message("users.disable")
def _disabled(made: Principal, given: Given) -> Message:
    return Message(
        f"{made.name} is disabled, with all of its tokens", (("undo", f"users enable {made.name}"),)
    )


@PRESENTATION.message("users.enable")
def _enabled(made: Principal, given: Given) -> Message:
    return Message(f"{made.name} is enabled", (("undo", f"users disable {made.name}"),))
