"""`falaj webhooks`: send events to receivers outside the platform, and see what they have got."""

from __future__ import annotations

from urllib.parse import urlsplit

from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.output.messages import Given, Message, command_with, workspace_prefix
from falaj.apps.cli.output.values import plural
from falaj.records.governance.events import UndeliveredEvent, Webhook, WebhookState

PRESENTATION = Presentation(
    columns={
        Webhook: ("name", "state", "types", "url", "delivered", "waiting", "given_up", "error"),
        UndeliveredEvent: ("at", "type", "subject", "attempts", "error", "redelivering", "event"),
    },
    help={
        "event": "Only this event: its id.",
        "types": "A type of event, such as models.promote or jobs.*.",
        "url": "Where the events go: https://HOST/PATH.",
    },
    examples={"types": "jobs.*", "url": "https://hooks.example.com/falaj"},
    lists={"webhook": "webhooks list"},
)


@PRESENTATION.message("webhooks.create")
def _created(made: Webhook, given: Given) -> Message:
    name = workspace_prefix(given) + made.name
    return Message(
        f"webhook {made.name} sends {', '.join(made.types)} to {urlsplit(made.url).hostname}\n"
        f"  secret {made.secret}  (shown only now; the receiver checks signatures with it)",
        (("next", command_with("webhooks test", name)), ("undo", command_with("webhooks remove", name))),
    )


@PRESENTATION.message("webhooks.rotate_secret")
def _rotated(made: Webhook, given: Given) -> Message:
    return Message(f"webhook {made.name} has a new secret, shown only now\n  secret {made.secret}")


@PRESENTATION.message("webhooks.test")
def _tested(made: Webhook, given: Given) -> Message:
    paused = "; it is paused, and gets it when it is resumed" if made.state is WebhookState.PAUSED else ""
    return Message(
        f"a test event waits for webhook {made.name}{paused}",
        (("next", command_with("webhooks show", given["webhook"])),),
    )


@PRESENTATION.message("webhooks.pause")
def _paused(made: Webhook, given: Given) -> Message:
    return Message(
        f"webhook {made.name} is paused; its events wait for 30 days",
        (("undo", command_with("webhooks resume", given["webhook"])),),
    )


@PRESENTATION.message("webhooks.resume")
def _resumed(made: Webhook, given: Given) -> Message:
    return Message(
        f"webhook {made.name} is resumed; {plural(made.waiting, 'event')} wait",
        (("undo", command_with("webhooks pause", given["webhook"])),),
    )


@PRESENTATION.message("webhooks.redeliver")
def _redelivered(made: Webhook, given: Given) -> Message:
    which = given.get("event") or plural(made.given_up, "event")
    return Message(
        f"{which} will be sent to webhook {made.name} again",
        (("next", command_with("webhooks undelivered", given["webhook"])),),
    )


@PRESENTATION.message("webhooks.remove")
def _removed(made: Webhook, given: Given) -> Message:
    return Message(
        f"webhook {made.name} is removed; {plural(made.waiting, 'event')} that waited are not sent"
    )
