"""The stored events, webhooks, and how far each webhook has come."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import and_, delete, func, insert, or_, select, update

from falaj.governance.objects import rows_by_ids
from falaj.governance.operations.events import PREFIX
from falaj.governance.tables import events, objects, undelivered_events, webhook_progress, webhooks
from falaj.ports.metadata import Transaction
from falaj.records.governance.events import (
    DeliveryReport,
    Event,
    EventFormat,
    EventPosition,
    FailedDelivery,
    UndeliveredEvent,
    Webhook,
    WebhookState,
)
from falaj.records.governance.objects import StoredObject

TEST = PREFIX + "webhooks.test"
"""The type of the event that `webhooks test` makes; its webhook gets it whatever types it asks for."""

PAUSES = tuple(timedelta(seconds=seconds) for seconds in (5, 30, 120, 600, 3600))
"""Pauses after the first failed attempts of an event; later ones are like the last."""
REFUSALS = 5
"""Attempts of an event that the receiver answers with a refusal, until it is given up."""
GIVE_UP_AFTER = timedelta(hours=24)
"""How long an event is tried at a receiver that does not answer or has errors, until it is given up."""
SCANNED = 500
"""Events that are read at once; those of other types are passed over."""
COUNTED = 10_000
"""Waiting events are counted up to this number."""
_MARKS = "SELECT webhook, seq, part, attempts, delivered FROM governance_webhook_progress WHERE webhook"


@dataclass(frozen=True)
class StoredEvent:
    """An event with its place in the order of events."""

    position: EventPosition
    workspace: str
    event: Event


@dataclass(frozen=True)
class ActiveWebhook:
    """A webhook that is not paused, and the event that it has come to."""

    id: str
    name: str
    workspace: str
    url: str
    types: tuple[str, ...]
    secret: bytes
    written_as: EventFormat
    position: EventPosition
    retry_at: datetime | None


@dataclass(frozen=True)
class EventBatch:
    """What to send next: events that are sent again, and new ones in their order; `scanned` is where these end."""

    again: tuple[StoredEvent, ...]
    new: tuple[StoredEvent, ...]
    scanned: EventPosition


# ----------------------------------------------------------------------------------------------- events


def list_events(
    tx: Transaction,
    *,
    workspace: str,
    after: EventPosition,
    limit: int,
    types: Sequence[str] = (),
    since: datetime | None = None,
) -> list[StoredEvent]:
    """Return events of a workspace in their order."""
    query = select(events).where(events.c.workspace == workspace, _is_after(after))
    if types:
        query = query.where(or_(*(_fits(pattern) for pattern in types)))
    if since is not None:
        query = query.where(events.c.at >= since)
    found = tx.execute(query.order_by(events.c.seq, events.c.part).limit(limit)).mappings()
    return [_stored(row) for row in found]


def list_all(tx: Transaction, *, after: EventPosition, limit: int) -> list[StoredEvent]:
    """Return events of all workspaces in their order."""
    query = select(events).where(_is_after(after)).order_by(events.c.seq, events.c.part).limit(limit)
    return [_stored(row) for row in tx.execute(query).mappings()]


def newest_position(tx: Transaction) -> EventPosition:
    """Return the place of the newest event."""
    row = tx.execute(
        select(events.c.seq, events.c.part).order_by(events.c.seq.desc(), events.c.part.desc()).limit(1)
    ).first()
    return EventPosition(seq=-1, part=0) if row is None else EventPosition(seq=row.seq, part=row.part)


def matches(event: Event, types: Collection[str], *, webhook: str) -> bool:
    """Tell whether a webhook with `types` gets `event`."""
    if event.type == TEST:
        return event.subject == webhook
    name = event.type.removeprefix(PREFIX)
    return any(pattern in ("*", name) or pattern == f"{name.partition('.')[0]}.*" for pattern in types)


def _fits(pattern: str) -> Any:
    if pattern == "*":
        return events.c.type.is_not(None)
    if pattern.endswith(".*"):
        return events.c.type.startswith(PREFIX + pattern.removesuffix("*"), autoescape=True)
    return events.c.type == PREFIX + pattern


def _is_after(position: EventPosition) -> Any:
    here = events.c.seq == position.seq
    return or_(events.c.seq > position.seq, and_(here, events.c.part > position.part))


def _stored(row: Any) -> StoredEvent:
    data = dict(row["data"])
    event = Event(
        id=row["id"],
        type=row["type"],
        subject=row["subject"],
        name=data.get("name"),
        caller=data.get("caller"),
        at=row["at"],
        seq=row["seq"],
        data=data,
    )
    return StoredEvent(EventPosition(seq=row["seq"], part=row["part"]), row["workspace"], event)


# --------------------------------------------------------------------------------------------- webhooks


def add_webhook(
    tx: Transaction,
    new: StoredObject,
    *,
    url: str,
    types: Sequence[str],
    secret: bytes,
    written_as: EventFormat,
) -> None:
    """Store a webhook that gets the events from now on."""
    row = {"id": new.id, "url": url, "types": list(types), "secret": secret, "paused": False}
    row["written_as"] = written_as.value
    tx.execute(insert(webhooks), row)
    begin = newest_position(tx)
    place = {"webhook": new.id, "seq": begin.seq, "part": begin.part}
    tx.execute(insert(webhook_progress), place | {"delivered": 0, "attempts": 0})


def change_webhook(tx: Transaction, webhook: str, **values: Any) -> None:
    tx.execute(update(webhooks).where(webhooks.c.id == webhook).values(**values))


def remove_webhook(tx: Transaction, webhook: str) -> None:
    tx.execute(delete(undelivered_events).where(undelivered_events.c.webhook == webhook))
    tx.execute(delete(webhook_progress).where(webhook_progress.c.webhook == webhook))
    tx.execute(delete(webhooks).where(webhooks.c.id == webhook))


def webhook_record(tx: Transaction, found: StoredObject, *, secret: str | None = None) -> Webhook:
    row = tx.execute(select(webhooks).where(webhooks.c.id == found.id)).mappings().one()
    progress = _progress(tx, found.id)
    types = tuple(row["types"])
    failing = WebhookState.FAILING if progress["attempts"] else WebhookState.DELIVERING
    return Webhook(
        id=found.id,
        name=found.name,
        url=row["url"],
        types=types,
        written_as=EventFormat(row["written_as"]),
        state=WebhookState.PAUSED if row["paused"] else failing,
        delivered=progress["delivered"],
        waiting=_count_waiting(tx, found, types, _position(progress)),
        given_up=tx.execute(
            select(func.count())
            .select_from(undelivered_events)
            .where(undelivered_events.c.webhook == found.id)
        ).scalar_one(),
        error=progress["error"],
        next_attempt_at=progress["retry_at"],
        last_delivered_at=progress["delivered_at"],
        created_at=found.created_at,
        secret=secret,
    )


def change_marks(tx: Transaction, idents: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return, for each webhook, what differs once events were sent, or could not be."""
    return rows_by_ids(tx, _MARKS, idents)


def _count_waiting(tx: Transaction, found: StoredObject, types: Sequence[str], after: EventPosition) -> int:
    query = select(events.c.seq).where(events.c.workspace == found.workspace, _is_after(after))
    waiting = query.where(or_(*(_fits(pattern) for pattern in types))).limit(COUNTED)
    return int(tx.execute(select(func.count()).select_from(waiting.subquery())).scalar_one())


def _progress(tx: Transaction, webhook: str) -> Any:
    query = select(webhook_progress).where(webhook_progress.c.webhook == webhook)
    return tx.execute(query).mappings().one()


def _position(progress: Any) -> EventPosition:
    return EventPosition(seq=progress["seq"], part=progress["part"])


# --------------------------------------------------------------------------------------------- delivery


def active_webhooks(tx: Transaction) -> list[ActiveWebhook]:
    """Return the webhooks that are not paused."""
    query = select(webhooks, objects.c.workspace, objects.c.name, webhook_progress)
    query = query.join(objects, objects.c.id == webhooks.c.id)
    query = query.join(webhook_progress, webhook_progress.c.webhook == webhooks.c.id).where(
        ~webhooks.c.paused
    )
    return [
        ActiveWebhook(
            id=row["id"],
            name=row["name"],
            workspace=row["workspace"],
            url=row["url"],
            types=tuple(row["types"]),
            secret=bytes(row["secret"]),
            written_as=EventFormat(row["written_as"]),
            position=_position(row),
            retry_at=row["retry_at"],
        )
        for row in tx.execute(query.order_by(webhooks.c.id)).mappings()
    ]


def next_batch(
    tx: Transaction, hook: ActiveWebhook, *, after: EventPosition, limit: int, now: datetime
) -> EventBatch:
    """Return what to send next; new events only if no failed attempt makes them wait."""
    joined = and_(events.c.seq == undelivered_events.c.seq, events.c.part == undelivered_events.c.part)
    asked = select(events).join(undelivered_events, joined)
    asked = asked.where(undelivered_events.c.webhook == hook.id, undelivered_events.c.redelivering)
    rows = tx.execute(asked.order_by(events.c.seq, events.c.part).limit(limit)).mappings()
    again = tuple(_stored(row) for row in rows)
    if hook.retry_at is not None and hook.retry_at > now:
        return EventBatch(again, (), after)
    found = list_events(tx, workspace=hook.workspace, after=after, limit=SCANNED)
    wanted = [each for each in found if matches(each.event, hook.types, webhook=hook.id)]
    if len(wanted) > limit:
        return EventBatch(again, tuple(wanted[:limit]), wanted[limit - 1].position)
    return EventBatch(
        again, tuple(wanted), found[-1].position if len(found) == SCANNED else newest_position(tx)
    )


def record_report(tx: Transaction, webhook: str, report: DeliveryReport, *, now: datetime) -> None:
    """Move a webhook to where `report` ends, and store what failed."""
    before = _progress(tx, webhook)
    values: dict[str, Any] = {"seq": report.scanned.seq, "part": report.scanned.part}
    if done := len(report.delivered) + len(report.redelivered):
        values |= {"delivered": before["delivered"] + done, "delivered_at": now}
    if report.scanned != _position(before):
        values |= {"attempts": 0, "failing_since": None, "retry_at": None, "error": None}
    for each in (*report.withheld, *report.failed_again):
        give_up(tx, webhook, each, attempts=1, now=now)
    for position in report.redelivered:
        forget_undelivered(tx, webhook, position)
    if report.failed is not None:
        values |= _after_failure(tx, webhook, report.failed, report.refused, {**before, **values}, now=now)
    tx.execute(update(webhook_progress).where(webhook_progress.c.webhook == webhook).values(**values))
    if report.gone:
        change_webhook(tx, webhook, paused=True)


def _after_failure(
    tx: Transaction,
    webhook: str,
    failed: FailedDelivery,
    refused: bool,
    progress: dict[str, Any],
    *,
    now: datetime,
) -> dict[str, Any]:
    """Return the progress after a failed attempt: the event is tried again later, or given up."""
    attempts, since = progress["attempts"] + 1, progress["failing_since"] or now
    if attempts >= REFUSALS if refused else now - since >= GIVE_UP_AFTER:
        give_up(tx, webhook, failed, attempts=attempts, now=now)
        place = {"seq": failed.position.seq, "part": failed.position.part}
        return place | {"attempts": 0, "failing_since": None, "retry_at": None, "error": failed.error}
    pause = PAUSES[min(attempts, len(PAUSES)) - 1]
    return {"attempts": attempts, "failing_since": since, "retry_at": now + pause, "error": failed.error}


def give_up(tx: Transaction, webhook: str, failed: FailedDelivery, *, attempts: int, now: datetime) -> None:
    """Put an event among the undelivered ones of a webhook."""
    place = {"webhook": webhook, "seq": failed.position.seq, "part": failed.position.part}
    said = {"error": failed.error, "given_up_at": now, "redelivering": False}
    mine = [getattr(undelivered_events.c, name) == value for name, value in place.items()]
    known = tx.execute(select(undelivered_events.c.attempts).where(*mine)).scalar()
    if known is None:
        tx.execute(insert(undelivered_events), place | said | {"attempts": attempts})
    else:
        tx.execute(update(undelivered_events).where(*mine).values(**said, attempts=known + attempts))


def forget_undelivered(tx: Transaction, webhook: str, position: EventPosition) -> None:
    """Remove an event that was delivered after all from the undelivered ones."""
    mine = undelivered_events.c.seq == position.seq, undelivered_events.c.part == position.part
    tx.execute(delete(undelivered_events).where(undelivered_events.c.webhook == webhook, *mine))


def undelivered(
    tx: Transaction, webhook: str, *, after: EventPosition, limit: int
) -> list[tuple[EventPosition, UndeliveredEvent]]:
    """Return the events of a webhook that were given up, in the order of events."""
    joined = and_(events.c.seq == undelivered_events.c.seq, events.c.part == undelivered_events.c.part)
    query = select(
        undelivered_events, events.c.id.label("event"), events.c.type, events.c.subject, events.c.at
    )
    query = query.join(events, joined).where(undelivered_events.c.webhook == webhook, _is_after(after))
    rows = tx.execute(query.order_by(events.c.seq, events.c.part).limit(limit)).mappings()
    names = UndeliveredEvent.model_fields
    return [(_position(row), UndeliveredEvent(**{name: row[name] for name in names})) for row in rows]


def redeliver(tx: Transaction, webhook: str, *, event: str | None) -> int:
    """Mark one undelivered event of a webhook, or all, to be sent again; return how many."""
    change = update(undelivered_events).where(undelivered_events.c.webhook == webhook)
    if event is not None:
        place = tx.execute(select(events.c.seq, events.c.part).where(events.c.id == event)).first()
        if place is None:
            return 0
        change = change.where(undelivered_events.c.seq == place.seq, undelivered_events.c.part == place.part)
    return tx.execute(change.values(redelivering=True)).rowcount


def forget_events(tx: Transaction, *, before: datetime) -> int:
    """Delete events that are older than `before`, delivered or not; return how many."""
    old = select(events.c.seq).where(
        events.c.at < before,
        events.c.seq == undelivered_events.c.seq,
        events.c.part == undelivered_events.c.part,
    )
    tx.execute(delete(undelivered_events).where(old.exists()))
    return tx.execute(delete(events).where(events.c.at < before)).rowcount


def retry_now(tx: Transaction, webhook: str) -> None:
    """Let the next attempt of a webhook be made at once."""
    tx.execute(update(webhook_progress).where(webhook_progress.c.webhook == webhook).values(retry_at=None))
