"""The configured zones, and the residency check of storage, launch, serving, download and export."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from falaj.errors import Fault, InvalidInput, ResidencyDenied
from falaj.governance.lineage import graph
from falaj.ports.metadata import Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.governance.residency import Zone

HIDDEN = "(another workspace)"
"""The name that is shown for an object that the caller may not see."""


class ZoneRegistry:
    """The configured zones; one of them is where bytes go unless the caller says otherwise."""

    def __init__(self, zones: Sequence[Zone]) -> None:
        self._zones = {zone.name: zone for zone in zones}
        self.default = next((zone for zone in zones if zone.default), zones[0])

    def all(self) -> list[Zone]:
        return list(self._zones.values())

    def named(self, name: str | None) -> Zone:
        """Return the zone `name`, or the default one."""
        if name is None:
            return self.default
        try:
            return self._zones[name]
        except KeyError:
            raise InvalidInput.at("zone", given=name, allowed=", ".join(self._zones)) from None

    def require(
        self,
        tx: Transaction,
        inputs: Iterable[StoredObject],
        zone: Zone,
        *,
        seen: Callable[[StoredObject], bool],
    ) -> None:
        """Raise ResidencyDenied, with the path from the labelled source, if an input may not lie in `zone`.

        What the caller may not see (`seen`) keeps its place in the path, but not its name.
        """
        for found in inputs:
            if not found.label.permits(zone.jurisdiction):
                path = graph.path_from_restriction(tx, found, zone.jurisdiction)
                raise refusal(path, zone, names=[each.address if seen(each) else HIDDEN for each in path])


def refusal(path: list[StoredObject], zone: Zone, *, names: list[str]) -> ResidencyDenied:
    source, found = path[0], path[-1]
    allowed = ", ".join(sorted(found.label.only or ())) or "nowhere"
    fault = Fault(
        where=" → ".join(names),
        given=f"zone {zone.name} ({zone.jurisdiction})",
        allowed=f"{names[0]} is labelled {source.own_label.describe()}",
        fix=f"choose a zone in {allowed}",
    )
    return ResidencyDenied(
        f"{names[-1]} may not lie in zone {zone.name} ({zone.jurisdiction}): allowed is {allowed}",
        faults=[fault],
        details={"path": names, "zone": zone.name},
    )
