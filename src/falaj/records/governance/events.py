"""Events, and the webhooks that receive them."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from falaj.records.names import ActionPattern, AnyRef, ObjectId, Reference, RefersTo, TextRule
from falaj.records.record import Record

WebhookRef = Annotated[Reference, RefersTo("webhook")]
EventId = Annotated[
    str,
    TextRule("evt_[0-9a-z]{26}", "the id of an event, like evt_01h…, as `falaj events list` shows", limit=30),
]
WebhookUrl = Annotated[str, Field(min_length=1, max_length=2000)]
EventTypes = Annotated[tuple[ActionPattern, ...], Field(min_length=1, max_length=50)]
FollowedObjects = Annotated[tuple[AnyRef, ...], Field(max_length=200)]


class Event(Record):
    """Something that was done: `type` is falaj. and the operation, `seq` the number of its audit entry."""

    id: str
    type: str
    subject: str
    name: str | None = None
    caller: str | None = None
    at: datetime
    seq: int
    data: dict[str, Any]


class EventNotice(Record):
    """What a stream of events says: an event, or none as a heartbeat; `cursor` continues the stream behind it.

    `changed` are those of the followed objects that have changed, whether or not an event tells of it.
    """

    cursor: str
    event: Event | None = None
    changed: tuple[ObjectId, ...] = ()


class WebhookState(StrEnum):
    """delivering; failing: the newest attempt failed and is repeated; paused: nothing is sent."""

    DELIVERING = "delivering"
    FAILING = "failing"
    PAUSED = "paused"


class EventFormat(StrEnum):
    """How events are written for a webhook."""

    CLOUDEVENTS = "cloudevents"
    OPENLINEAGE = "openlineage"


class Webhook(Record):
    """A receiver of events. `secret`, with which deliveries are signed, is shown once: when it is made.

    A receiver of OpenLineage gets the events that say which data was read and made.
    """

    id: ObjectId
    name: str
    url: str
    types: tuple[str, ...]
    written_as: EventFormat = EventFormat.CLOUDEVENTS
    state: WebhookState
    delivered: int
    waiting: int
    given_up: int
    error: str | None = None
    next_attempt_at: datetime | None = None
    last_delivered_at: datetime | None = None
    created_at: datetime
    secret: str | None = None


class EventPosition(Record):
    """A place in the order of events: the audit entry, and the event of it."""

    seq: Annotated[int, Field(ge=-1)]
    part: Annotated[int, Field(ge=0)]


class FailedDelivery(Record):
    """An event that could not be delivered, and why."""

    position: EventPosition
    error: Annotated[str, Field(max_length=500)]


class DeliveryReport(Record):
    """What became of a batch of events for one webhook.

    Up to `scanned`, all new events are `delivered`, were given up (`withheld`: they may not go there), or are of other
    types. `failed` is the new event after that, if its delivery failed; `refused`: the receiver answered that it does
    not take it. `redelivered` and `failed_again` had been given up before. `gone`: the receiver wants no more events.
    """

    scanned: EventPosition
    delivered: tuple[EventPosition, ...] = ()
    withheld: tuple[FailedDelivery, ...] = ()
    failed: FailedDelivery | None = None
    refused: bool = False
    redelivered: tuple[EventPosition, ...] = ()
    failed_again: tuple[FailedDelivery, ...] = ()
    gone: bool = False


class UndeliveredEvent(Record):
    """An event that was given up after several attempts; `webhooks redeliver` sends it again."""

    event: str
    type: str
    subject: str
    at: datetime
    attempts: int
    error: str
    given_up_at: datetime
    redelivering: bool
