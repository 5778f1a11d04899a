"""Operations on the platform as a whole: its status, cleanup and metrics."""

from __future__ import annotations

from datetime import timedelta

from falaj.control import lease
from falaj.control.nodes import NodeSource, machines_now
from falaj.governance import backups
from falaj.governance.bootstrap import count_users
from falaj.governance.events.store import forget_events
from falaj.governance.identity.tokens import forget_links
from falaj.governance.operations import idempotency
from falaj.governance.operations.call import current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, operation
from falaj.ports.keys import KeyService
from falaj.records.backups import BackupHold, BackupId, BackupSignature, Sha256, backup_message
from falaj.records.governance.identity import Role
from falaj.records.platform import CleanupResult, MetricsText, PlatformFacts
from falaj.training import store
from falaj.version import VERSION

KEYS_KEPT = timedelta(days=7)
EVENTS_KEPT = timedelta(days=30)


class PlatformService:
    """The status of the platform for everyone, its metrics and cleanup for operators."""

    def __init__(self, gate: Gate, keys: KeyService, nodes: NodeSource) -> None:
        self.gate = gate
        self._keys = keys
        self._nodes = nodes

    @operation("platform.status", resource="platform", mode=Mode.READ, allow="anyone")
    def status(self) -> PlatformFacts:
        """Show the version, the acting controller, the zones, and the processes that keep failing."""
        call = current_call()
        return PlatformFacts(
            version=VERSION,
            controller=lease.held_by(call.tx, now=call.now),
            zones=tuple(self.gate.zones.all()),
            users=count_users(call.tx),
            failing=dict(self.gate.failing()),
        )

    @operation("platform.cleanup", resource="platform", allow=Role.OPERATOR)
    def cleanup(self) -> CleanupResult:
        """Delete old idempotency keys, events and sign-in links. The controller calls this periodically."""
        call = current_call()
        return CleanupResult(
            keys=idempotency.forget(call.tx, before=call.now - KEYS_KEPT),
            events=forget_events(call.tx, before=call.now - EVENTS_KEPT),
            links=forget_links(call.tx, before=call.now),
        )

    @operation("platform.begin_backup", resource="platform", allow=Role.ADMIN)
    def begin_backup(self) -> BackupHold:
        """Keep all stored bytes for ten minutes, so that `falaj backup` can copy what the database refers to."""
        call = current_call()
        key = self._keys.public_key()
        return backups.begin(call.tx, caller=call.caller.name, public_key=key, now=call.now)

    @operation("platform.extend_backup", resource="platform", allow=Role.ADMIN)
    def extend_backup(self, backup: BackupId) -> BackupHold:
        """Keep all stored bytes for ten more minutes. `falaj backup` calls this while it copies."""
        call = current_call()
        return backups.extend(call.tx, backup, public_key=self._keys.public_key(), now=call.now)

    @operation("platform.finish_backup", resource="platform", allow=Role.ADMIN)
    def finish_backup(self, backup: BackupId, manifest: Sha256) -> BackupSignature:
        """Sign the manifest of a backup, given by its SHA-256, and let bytes be deleted again."""
        call = current_call()
        backups.finish(call.tx, backup, manifest=manifest, now=call.now)
        signature = self._keys.sign(backup_message(self.gate.audit.log_id, manifest))
        return BackupSignature(public_key=self._keys.public_key().hex(), signature=signature.hex())

    @operation("platform.metrics", resource="platform", mode=Mode.HOT, allow={Role.OPERATOR, Role.AUDITOR})
    def metrics(self) -> MetricsText:
        """Return metrics in the Prometheus text format: of nodes, GPUs, queues, and of the answering process."""
        from prometheus_client import generate_latest

        from falaj.control.metrics import PlatformMetrics

        with self.gate.database.read() as tx:
            machines, jobs = machines_now(tx, self._nodes), store.unfinished_in_queues(tx)
        found = PlatformMetrics(machines, self._nodes.telemetry(), jobs)
        return MetricsText(text=generate_latest().decode() + found.text())
