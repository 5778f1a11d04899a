"""`falaj objects`: stored objects of any kind, and their labels."""

from __future__ import annotations

from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.output.messages import Given, Message, command_with
from falaj.apps.cli.output.values import plural
from falaj.records.governance.objects import LabelChange, StoredObject

PRESENTATION = Presentation(
    columns={StoredObject: ("name", "kind", "zone", "label", "created_at", "id")},
    help={"kind": "The kind of object, such as blob or model."},
)


@PRESENTATION.message("objects.label", "objects.unlabel")
def _labelled(made: LabelChange, given: Given) -> Message:
    words = f"{made.object.address} is labelled: {made.object.label.describe()}"
    reach = f"{plural(made.reached, 'object')} downstream changed with it"
    misplaced = [f"  {each.address} may no longer be stored in zone {each.zone}" for each in made.misplaced]
    undo = (
        (("undo", command_with("objects unlabel", given["object"])),)
        if "only" in given or "classes" in given
        else ()
    )
    return Message("\n".join([f"{words}; {reach}", *misplaced]), undo)
