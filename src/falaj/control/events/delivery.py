"""Deliver events to webhooks: in order, at least once, as signed CloudEvents.

Each webhook has a thread while there is something for it, so that a slow receiver delays nobody else. What was sent is
recorded by `webhooks.record`; a controller that ends before that sends the same events again, under the same ids.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

from falaj.control.authorization import acting, controller_caller
from falaj.control.events.openlineage import lineage_event
from falaj.errors import FalajError, Fenced, ResidencyDenied, Unavailable
from falaj.governance import objects
from falaj.governance.events import store
from falaj.governance.events.service import Webhooks, open_secret
from falaj.governance.events.store import ActiveWebhook, EventBatch, StoredEvent
from falaj.governance.operations.gate import Gate
from falaj.ports.egress import DeliveryFailed
from falaj.ports.metadata import Transaction
from falaj.records.governance.events import DeliveryReport, EventFormat, EventPosition, FailedDelivery

log = logging.getLogger("falaj.webhooks")

BATCH = 50
"""Events that are sent to a webhook before what became of them is recorded."""
BATCH_S = 20.0
"""After so long no further event of a batch is sent."""
THREADS = 8
SAVE_AFTER = 5_000
"""Events of other types that are passed over before the position is stored; a new controller reads them again."""
GONE = 410
NOTHING_TO_SEND = 204
CONTENT_TYPES = {
    EventFormat.CLOUDEVENTS: "application/cloudevents+json; charset=utf-8",
    EventFormat.OPENLINEAGE: "application/json; charset=utf-8",
}


class WebhookDelivery:
    """Sends what waits for webhooks. `tick` returns at once; threads send."""

    def __init__(self, gate: Gate, webhooks: Webhooks, *, fence: int) -> None:
        self._gate = gate
        self._webhooks = webhooks
        self._fence = fence
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="webhooks")
        self._running: dict[str, Future[None]] = {}
        self._scanned: dict[str, EventPosition] = {}

    def tick(self) -> None:
        """Start sending to each webhook for which something waits. Raise Fenced if the lease was found lost."""
        for webhook, sending in list(self._running.items()):
            if sending.done():
                del self._running[webhook]
                _raise_if_lost(sending)
        with self._gate.database.read() as tx:
            hooks = [each for each in store.active_webhooks(tx) if each.id not in self._running]
            batches = [(hook, self._next_batch(tx, hook)) for hook in hooks]
        for hook, batch in batches:
            if batch.again or batch.new:
                self._running[hook.id] = self._threads.submit(self._send_batch, hook, batch)
            elif batch.scanned.seq - hook.position.seq > SAVE_AFTER:
                self._record(hook, DeliveryReport(scanned=batch.scanned))
            else:
                self._scanned[hook.id] = batch.scanned

    def close(self) -> None:
        """Send nothing further; a request that is under way ends on its own."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _next_batch(self, tx: Transaction, hook: ActiveWebhook) -> EventBatch:
        known = self._scanned.get(hook.id, hook.position)
        after = max(known, hook.position, key=lambda each: (each.seq, each.part))
        return store.next_batch(tx, hook, after=after, limit=BATCH, now=self._gate.clock())

    def _send_batch(self, hook: ActiveWebhook, batch: EventBatch) -> None:
        try:
            self._record(hook, _Attempt(self._sender(hook), hook, batch).run())
        except Fenced:
            raise
        except Unavailable as error:
            log.warning(
                "deliveries of a webhook not recorded", extra={"webhook": hook.id, "reason": error.message}
            )
        except FalajError as error:
            log.error("delivery to a webhook failed", extra={"webhook": hook.id, "reason": error.message})
        except Exception:
            log.exception("delivery to a webhook failed", extra={"webhook": hook.id})

    def _record(self, hook: ActiveWebhook, report: DeliveryReport) -> None:
        with acting(controller_caller(self._gate.database), fence=self._fence):
            self._webhooks.record(hook.id, report=report)
        self._scanned.pop(hook.id, None)
        if report.failed is not None:
            extra = {"webhook": hook.id, "host": urlsplit(hook.url).hostname, "reason": report.failed.error}
            log.warning("event not delivered", extra=extra)

    def _sender(self, hook: ActiveWebhook) -> Callable[[StoredEvent], int]:
        secret = open_secret(self._webhooks, hook)
        source = f"/falaj/{self._gate.audit.log_id}/workspaces/{hook.workspace}"

        def send(found: StoredEvent) -> int:
            body = self._written(hook, found, source)
            if body is None:
                return NOTHING_TO_SEND
            headers = sign(secret, found.event.id, body, at=int(self._gate.clock().timestamp()))
            headers["content-type"] = CONTENT_TYPES[hook.written_as]
            return self._webhooks.egress.post(
                hook.url, headers=headers, body=body, admit=lambda address: self._admit(found, address)
            )

        return send

    def _written(self, hook: ActiveWebhook, found: StoredEvent, source: str) -> bytes | None:
        """Return the body of a delivery; None if the format of the webhook has no words for the event."""
        if hook.written_as is EventFormat.CLOUDEVENTS:
            return cloud_event(found, source=source)
        with self._gate.database.read() as tx:
            return lineage_event(tx, found, platform=self._gate.audit.log_id)

    def _admit(self, found: StoredEvent, address: str) -> None:
        """Raise ResidencyDenied if what the event is about may not be known where the address is."""
        with self._gate.database.read() as tx:
            subject = objects.ever(tx, found.event.subject)
            if subject is not None:
                self._gate.zones.require_download(tx, [subject], f"remote:{address}", seen=lambda _: False)


@dataclass
class _Attempt:
    """One pass over a batch: it ends at the first new event that the receiver does not take."""

    send: Callable[[StoredEvent], int]
    hook: ActiveWebhook
    batch: EventBatch

    def run(self) -> DeliveryReport:
        until = time.monotonic() + BATCH_S
        delivered: list[EventPosition] = []
        redelivered: list[EventPosition] = []
        withheld: list[FailedDelivery] = []
        failed_again: list[FailedDelivery] = []
        position = self.batch.scanned if not self.batch.new else self.hook.position
        failed, status = None, 0
        for found in self.batch.again:
            if time.monotonic() > until:
                break
            status, error = self._try(found)
            if error is None:
                redelivered.append(found.position)
            else:
                failed_again.append(FailedDelivery(position=found.position, error=error))
        for found in self.batch.new:
            if time.monotonic() > until:
                break
            status, error = self._try(found)
            if error is None:
                delivered.append(found.position)
            elif status == WITHHELD:
                withheld.append(FailedDelivery(position=found.position, error=error))
            else:
                failed = FailedDelivery(position=found.position, error=error)
                break
            position = found.position
        else:
            position = self.batch.scanned
        return DeliveryReport(
            scanned=position,
            delivered=tuple(delivered),
            withheld=tuple(withheld),
            failed=failed,
            refused=is_refusal(status),
            redelivered=tuple(redelivered),
            failed_again=tuple(failed_again),
            gone=status == GONE,
        )

    def _try(self, found: StoredEvent) -> tuple[int, str | None]:
        """Send one event; return the status of the answer, and the error unless it was taken."""
        try:
            status = self.send(found)
        except DeliveryFailed as error:
            return 0, str(error)[:500]
        except ResidencyDenied:
            return WITHHELD, "the label of its object does not permit the zone of the receiver"
        return status, None if 200 <= status < 300 else f"the receiver answered {status}"


WITHHELD = -1


def is_refusal(status: int) -> bool:
    """Tell whether a receiver that answers so will not take the event later either."""
    return 300 <= status < 500 and status not in (408, 425, 429)


def cloud_event(found: StoredEvent, *, source: str) -> bytes:
    """Return an event in the JSON format of CloudEvents 1.0."""
    event = found.event
    return json.dumps(
        {
            "specversion": "1.0",
            "id": event.id,
            "source": source,
            "type": event.type,
            "subject": event.subject,
            "time": event.at.isoformat().replace("+00:00", "Z"),
            "datacontenttype": "application/json",
            "data": event.data | {"audit_entry": event.seq},
        },
        separators=(",", ":"),
    ).encode()


def sign(secret: bytes, ident: str, body: bytes, *, at: int) -> dict[str, str]:
    """Return the headers of a delivery, with its signature as Standard Webhooks has it."""
    message = f"{ident}.{at}.".encode() + body
    signature = base64.b64encode(hmac.digest(secret, message, hashlib.sha256)).decode()
    return {
        "user-agent": "falaj-webhooks",
        "webhook-id": ident,
        "webhook-timestamp": str(at),
        "webhook-signature": f"v1,{signature}",
    }


def _raise_if_lost(sending: Future[None]) -> None:
    error = sending.exception()
    if isinstance(error, Fenced):
        raise error
