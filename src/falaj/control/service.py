"""The platform at a glance: what runs, and its metrics."""

from __future__ import annotations

from datetime import timedelta

from falaj.control import lease
from falaj.governance.bootstrap import count_users
from falaj.governance.identity.tokens import forget_links
from falaj.governance.operations import idempotency, outbox
from falaj.governance.operations.call import current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, operation
from falaj.records.governance.identity import Role
from falaj.records.platform import CleanupResult, MetricsText, PlatformFacts
from falaj.version import VERSION

KEYS_KEPT = timedelta(days=7)
EVENTS_KEPT = timedelta(days=30)


class PlatformService:
    """What anyone may know of the platform, and what operators watch."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    @operation("platform.status", resource="platform", mode=Mode.READ, allow="anyone")
    def status(self) -> PlatformFacts:
        """Which version runs, whether a controller acts, and which zones there are."""
        call = current_call()
        return PlatformFacts(
            version=VERSION,
            controller=lease.held_by(call.tx, now=call.now),
            zones=tuple(self.gate.zones.all()),
            users=count_users(call.tx),
        )

    @operation("platform.cleanup", resource="platform", allow=Role.OPERATOR)
    def cleanup(self) -> CleanupResult:
        """Drop idempotency keys, events and sign-in links that are old; the controller does it now and then."""
        call = current_call()
        return CleanupResult(
            keys=idempotency.forget(call.tx, before=call.now - KEYS_KEPT),
            events=outbox.forget(call.tx, before=call.now - EVENTS_KEPT),
            links=forget_links(call.tx, before=call.now),
        )

    @operation("platform.metrics", resource="platform", mode=Mode.HOT, allow={Role.OPERATOR, Role.AUDITOR})
    def metrics(self) -> MetricsText:
        """The metrics of the process that answers, in Prometheus' text format."""
        from prometheus_client import generate_latest

        return MetricsText(text=generate_latest().decode())
