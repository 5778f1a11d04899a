"""The operations on zones."""

from __future__ import annotations

from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, operation
from falaj.records.governance.residency import Zone
from falaj.records.names import AnyRef, ZoneName


class Zones:
    """List zones and check what may be stored in them."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    @operation("zones.list", resource="platform", mode=Mode.READ, allow="anyone")
    def list(self) -> tuple[Zone, ...]:
        """List the zones of this platform; they are configured in falaj.toml."""
        return tuple(self.gate.zones.all())

    @operation("zones.check", resource="object", mode=Mode.READ)
    def check(self, object: AnyRef, zone: ZoneName) -> Zone:
        """Check whether an object may be stored in a zone; a refusal shows the lineage path that forbids it."""
        return self.gate.zones.named(zone)
