"""Operations on events, and on the webhooks that receive them."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache, partial

from falaj.errors import InvalidInput, NotFound, Unavailable
from falaj.governance import objects
from falaj.governance.encryption.keyring import require_living_key
from falaj.governance.encryption.values import SealedValues
from falaj.governance.events import store
from falaj.governance.events.feed import POLL_S, EventFeed, MarkReaders
from falaj.governance.events.store import StoredEvent
from falaj.governance.operations.call import Call, current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, operation
from falaj.governance.operations.pagination import LARGEST_BATCH, list_workspace_page
from falaj.governance.policy.authorizer import SEE
from falaj.governance.policy.visibility import Visibility
from falaj.governance.record_stream import HEARTBEAT_S
from falaj.ports.egress import Egress
from falaj.ports.metadata import Transaction
from falaj.records.governance.events import (
    DeliveryReport,
    Event,
    EventFormat,
    EventId,
    EventNotice,
    EventPosition,
    EventTypes,
    FollowedObjects,
    UndeliveredEvent,
    Webhook,
    WebhookRef,
    WebhookUrl,
)
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import Cursor, Page, PageSize, StoredObject
from falaj.records.names import Name, ObjectId, WorkspaceRef

START = EventPosition(seq=-1, part=0)
SECRET_BYTES = 32


class Events:
    """What was done on the platform, in the order of the audit log."""

    def __init__(self, gate: Gate, *, marks: MarkReaders | None = None) -> None:
        """`marks` are the kinds of objects whose changes can be followed, and how changes are recognized."""
        self.gate = gate
        self._feed = EventFeed(gate.database, marks=marks)

    @operation("events.list", resource="workspace", mode=Mode.READ)
    def list(
        self,
        *,
        types: EventTypes | None = None,
        since: datetime | None = None,
        workspace: WorkspaceRef | None = None,
        after: Cursor = "",
        limit: PageSize = 100,
    ) -> Page[Event]:
        """List the events of a workspace, oldest first: those of objects that you may see, of the last 30 days."""
        call = current_call()
        position, shown, count = (
            _position(self.gate.cursors.read(call, after)),
            list[StoredEvent](),
            limit + 1,
        )
        visibility = self.gate.visibility()
        is_seen = cache(partial(_is_seen, call.tx, visibility))  # many events are about the same object
        while len(shown) <= limit:
            found = store.list_events(
                call.tx, workspace=call.target.id, after=position, limit=count, types=types or (), since=since
            )
            shown += [each for each in found if is_seen(each.event.subject)]
            if len(found) < count:
                break
            position, count = found[-1].position, min(2 * count, LARGEST_BATCH)
        following = None
        if len(shown) > limit:
            following = self.gate.cursors.write(call, _cursor(shown[limit - 1].position))
        return Page(items=tuple(each.event for each in shown[:limit]), next=following)

    @operation("events.watch", resource="workspace", mode=Mode.READ)
    def watch(
        self,
        *,
        types: EventTypes | None = None,
        workspace: WorkspaceRef | None = None,
        objects: FollowedObjects = (),
        after: Cursor = "",
    ) -> Iterator[EventNotice]:
        """Stream the events of a workspace as they are made, with heartbeats; `after` continues an earlier stream.

        The stream also tells, at most once a second, which of `objects` have changed: runs that got metric points, and
        others that change without an event. At first all of them count as changed.
        """
        call = current_call()
        given = self.gate.cursors.read(call, after)
        begin = _position(given) if given else store.newest_position(call.tx)
        followed = call.referred["objects"] if objects else []
        for each in followed:
            if each.kind not in self._feed.kinds:
                raise InvalidInput.at("objects", given=each.address, allowed=", ".join(self._feed.kinds))
        return self._watch(call, begin, types or ("*",), followed)

    def _watch(
        self, call: Call, position: EventPosition, types: EventTypes, followed: Sequence[StoredObject]
    ) -> Iterator[EventNotice]:
        write = partial(self.gate.cursors.write, call)
        with self._feed.watching(followed) as watcher:
            found: Sequence[StoredEvent] | None = ()
            changed: set[ObjectId] = set()
            due = time.monotonic()  # for the next heartbeat
            while True:
                try:
                    found = self._read_missed(position) if found is None else found
                    shown = self._shown(call, found, types)
                    changed |= self._feed.take_changes(watcher)
                    visible = self._visible(call, changed)
                except Unavailable:  # the database is busy or away: the next look may succeed
                    time.sleep(POLL_S)
                    continue
                for each in shown:
                    yield EventNotice(cursor=write(_cursor(each.position)), event=each.event)
                position = found[-1].position if found else position
                changed = set()
                if visible or time.monotonic() >= due:
                    yield EventNotice(cursor=write(_cursor(position)), changed=visible)
                    due = time.monotonic() + HEARTBEAT_S
                found = self._feed.wait(watcher, position, timeout_s=due - time.monotonic())

    def _read_missed(self, position: EventPosition) -> Sequence[StoredEvent]:
        """Return the events behind `position`, which the feed does not have in memory."""
        with self.gate.database.read() as tx:
            return store.list_all(tx, after=position, limit=LARGEST_BATCH)

    def _visible(self, call: Call, changed: Collection[ObjectId]) -> tuple[ObjectId, ...]:
        """Return those of `changed` that the caller of a stream may see now."""
        if not changed:
            return ()
        with self.gate.database.read() as tx:
            visibility = self._visibility(call, tx)
            return tuple(each for each in changed if _is_seen(tx, visibility, each))

    def _visibility(self, call: Call, tx: Transaction) -> Visibility:
        return Visibility(self.gate.authorizer, tx, replace(call.caller, actions=None), SEE)

    def _shown(self, call: Call, found: Sequence[StoredEvent], types: EventTypes) -> Sequence[StoredEvent]:
        """Return those of `found` that the caller of a stream asked for and may see."""
        asked = [
            each
            for each in found
            if each.workspace == call.target.id and store.matches(each.event, types, webhook="")
        ]
        if not asked:
            return []
        with self.gate.database.read() as tx:
            is_seen = cache(partial(_is_seen, tx, self._visibility(call, tx)))
            return [each for each in asked if is_seen(each.event.subject)]


class Webhooks:
    """Receivers of events outside the platform: each event is sent to them, signed, until they have taken it."""

    def __init__(self, gate: Gate, sealed: SealedValues, egress: Egress, *, types: Collection[str]) -> None:
        """`types` are the events that there are, by the names of their operations."""
        self.gate = gate
        self._sealed = sealed
        self.egress = egress
        self._types = types

    @operation("webhooks.create", resource="workspace", allow=Role.ADMIN)
    def create(
        self,
        name: Name,
        url: WebhookUrl,
        *,
        types: EventTypes = ("*",),
        written_as: EventFormat = EventFormat.CLOUDEVENTS,
        workspace: WorkspaceRef | None = None,
    ) -> Webhook:
        """Send the events of a workspace to a URL from now on; the answer has the secret that signs them, once.

        `url` is https://HOST/PATH; its host must be in egress.allow of falaj.toml. `types` are operations, groups of
        them or *: models.promote, jobs.*. A receiver of OpenLineage gets those that read or make data.
        """
        call = current_call()
        self.egress.require(url)
        self._require_types(types)
        require_living_key(call.tx, call.target.id)
        new = call.create("webhook", name, workspace=call.target)
        secret = secrets.token_bytes(SECRET_BYTES)
        sealed = self._sealed.seal(call.target.id, secret, context=_context(new))
        store.add_webhook(call.tx, new, url=url, types=types, secret=sealed, written_as=written_as)
        return store.webhook_record(call.tx, new, secret=_spelled(secret))

    @operation("webhooks.list", resource="workspace", mode=Mode.READ, allow=Role.ADMIN)
    def list(
        self, *, workspace: WorkspaceRef | None = None, after: Cursor = "", limit: PageSize = 100
    ) -> Page[Webhook]:
        """List the webhooks of a workspace, and how far each has come."""
        return list_workspace_page(
            self.gate,
            "webhook",
            lambda tx, page: [store.webhook_record(tx, each) for each in page],
            after=after,
            limit=limit,
        )

    @operation("webhooks.show", resource="webhook", mode=Mode.READ, allow=Role.ADMIN)
    def show(self, webhook: WebhookRef) -> Webhook:
        """Show a webhook: what it gets, what waits, and the error of the last attempt."""
        return store.webhook_record(current_call().tx, current_call().object("webhook"))

    @operation("webhooks.test", resource="webhook", allow=Role.ADMIN)
    def test(self, webhook: WebhookRef) -> Webhook:
        """Send a test event to a webhook, whatever types it asks for; `webhooks show` says what became of it."""
        return store.webhook_record(current_call().tx, current_call().object("webhook"))

    @operation("webhooks.pause", resource="webhook", allow=Role.ADMIN)
    def pause(self, webhook: WebhookRef) -> Webhook:
        """Send nothing to a webhook until it is resumed; its events wait, for 30 days."""
        return self._change(current_call().object("webhook"), paused=True)

    @operation("webhooks.resume", resource="webhook", allow=Role.ADMIN)
    def resume(self, webhook: WebhookRef) -> Webhook:
        """Go on sending to a webhook, at once, with the oldest event that it has not got."""
        call = current_call()
        store.retry_now(call.tx, call.object("webhook").id)
        return self._change(call.object("webhook"), paused=False)

    @operation("webhooks.rotate_secret", resource="webhook", allow=Role.ADMIN)
    def rotate_secret(self, webhook: WebhookRef) -> Webhook:
        """Sign the deliveries of a webhook with a new secret from now on; the answer has it, once."""
        call = current_call()
        found, secret = call.object("webhook"), secrets.token_bytes(SECRET_BYTES)
        require_living_key(call.tx, found.workspace)
        sealed = self._sealed.seal(found.workspace, secret, context=_context(found))
        store.change_webhook(call.tx, found.id, secret=sealed)
        return store.webhook_record(call.tx, found, secret=_spelled(secret))

    @operation("webhooks.undelivered", resource="webhook", mode=Mode.READ, allow=Role.ADMIN)
    def undelivered(
        self, webhook: WebhookRef, *, after: Cursor = "", limit: PageSize = 100
    ) -> Page[UndeliveredEvent]:
        """List the events that were given up after several attempts, oldest first."""
        call = current_call()
        found = store.undelivered(call.tx, call.object("webhook").id, after=_position(after), limit=limit + 1)
        following = _cursor(found[limit - 1][0]) if len(found) > limit else None
        return Page(items=tuple(each for _, each in found[:limit]), next=following)

    @operation("webhooks.redeliver", resource="webhook", allow=Role.ADMIN)
    def redeliver(self, webhook: WebhookRef, *, event: EventId | None = None) -> Webhook:
        """Send events that were given up once more: one of them, or all."""
        call = current_call()
        found = call.object("webhook")
        if not store.redeliver(call.tx, found.id, event=event) and event is not None:
            raise NotFound(f"event {event} is not among those that {found.name} was not given")
        return store.webhook_record(call.tx, found)

    @operation("webhooks.remove", resource="webhook", allow=Role.ADMIN, confirm=True)
    def remove(self, webhook: WebhookRef) -> Webhook:
        """Remove a webhook; what waits for it is not sent."""
        call = current_call()
        found = call.object("webhook")
        gone = store.webhook_record(call.tx, found)
        store.remove_webhook(call.tx, found.id)
        objects.delete(call.tx, found.id, at=call.now)
        return gone

    @operation("webhooks.record", resource="webhook", allow=Role.OPERATOR, internal=True)
    def record(self, webhook: WebhookRef, *, report: DeliveryReport) -> Webhook:
        """Record what was sent to a webhook. The controller calls this."""
        call = current_call()
        found = call.object("webhook")
        store.record_report(call.tx, found.id, report, now=call.now)
        sent = (*report.delivered, *report.redelivered)
        call.details["delivered"] = [f"{position.seq}.{position.part}" for position in sent]
        return store.webhook_record(call.tx, found)

    def _change(self, found: StoredObject, **values: bool) -> Webhook:
        tx = current_call().tx
        store.change_webhook(tx, found.id, **values)
        return store.webhook_record(tx, found)

    def _require_types(self, patterns: EventTypes) -> None:
        for pattern in patterns:
            if pattern not in ("*", *self._types, *(f"{each.partition('.')[0]}.*" for each in self._types)):
                group = pattern.partition(".")[0]
                near = [each for each in sorted(self._types) if each.startswith(f"{group}.")]
                groups = sorted({f"{each.partition('.')[0]}.*" for each in self._types})
                raise InvalidInput.at("types", given=pattern, allowed=", ".join(near or groups))


def open_secret(service: Webhooks, hook: store.ActiveWebhook) -> bytes:
    """Return the secret of a webhook, for the controller that signs with it."""
    context = f"{hook.workspace}/{hook.id}".encode()
    return service._sealed.unseal(hook.workspace, hook.secret, context=context)


def _spelled(secret: bytes) -> str:
    """Return a secret as libraries of Standard Webhooks take it."""
    return "whsec_" + base64.b64encode(secret).decode()


def _context(found: StoredObject) -> bytes:
    return f"{found.workspace}/{found.id}".encode()


def _is_seen(tx: Transaction, visibility: Visibility, ident: str) -> bool:
    subject = objects.ever(tx, ident)
    return subject is not None and visibility.allows(subject)


def _position(cursor: str) -> EventPosition:
    seq, _, part = cursor.partition(".")
    return EventPosition(seq=int(seq), part=int(part)) if cursor else START


def _cursor(position: EventPosition) -> str:
    return f"{position.seq}.{position.part}"
