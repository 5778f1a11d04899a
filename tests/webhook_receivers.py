"""A receiver of webhooks, and the delivery of a controller one pass at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

from falaj.control.events.delivery import WebhookDelivery
from platforms import TWO_ZONES, OwnPlatform
from polling import PATIENCE_S

ALLOWED = TWO_ZONES + '\n[egress]\nallow = ["127.0.0.0/8"]\n'


@dataclass
class Receiver:
    """Keeps the requests that it got, and answers with the statuses in `answers`, then with 204."""

    url: str = ""
    answers: list[int] = field(default_factory=list)
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)


@dataclass
class Deliveries:
    """The delivery of a controller, one pass at a time."""

    delivery: WebhookDelivery

    @classmethod
    def of(cls, platform: OwnPlatform) -> Deliveries:
        return cls(WebhookDelivery(platform.parts.gate, platform.parts.services.webhooks, fence=0))

    def run(self) -> None:
        """Send what waits, and record it."""
        self.delivery.tick()
        for sending in list(self.delivery._running.values()):
            sending.result(timeout=PATIENCE_S)
