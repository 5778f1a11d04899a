"""The configured zones, and the residency check of storage, launch, serving, download and export."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

from falaj.errors import Fault, InvalidInput, ResidencyDenied
from falaj.governance.lineage import graph
from falaj.ports.metadata import Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.governance.residency import UNKNOWN, Zone

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

HIDDEN = "(another workspace)"
"""The name that is shown for an object that the caller may not see."""


class ZoneRegistry:
    """The configured zones; one of them is where bytes go unless the caller says otherwise.

    `here` is the zone of this machine, UNKNOWN if it names none of several. `networks` are the addresses of each zone;
    without any, downloads are not asked where they go.
    """

    def __init__(
        self,
        zones: Sequence[Zone],
        *,
        here: str | None = None,
        networks: Mapping[str, Sequence[Network]] | None = None,
    ) -> None:
        self._zones = {zone.name: zone for zone in zones}
        self.default = next((zone for zone in zones if zone.default), zones[0])
        self.here = UNKNOWN if here is None else self._zones[here]
        self._networks = [(net, name) for name, nets in (networks or {}).items() for net in nets]
        self._places = lru_cache(maxsize=10_000)(self._place_of)

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

    def machine(self, name: str) -> Zone:
        """Return the zone that a machine is in; one that names none is UNKNOWN."""
        return UNKNOWN if name == UNKNOWN.name else self.named(name)

    def require_download(
        self,
        tx: Transaction,
        found: Sequence[StoredObject],
        origin: str,
        *,
        seen: Callable[[StoredObject], bool],
    ) -> None:
        """Raise ResidencyDenied if data of `found` may not go to where the caller is."""
        if self._networks:
            place = self._places(origin)
            try:
                self.require(tx, found, place, seen=seen)
            except ResidencyDenied as error:
                raise _not_to(error, origin, place) from None

    def _place_of(self, origin: str) -> Zone:
        """Return the zone of a caller: by its address, or that of this machine for callers on it."""
        kind, _, address = origin.partition(":")
        if kind != "remote":
            return self.here
        try:
            where = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return UNKNOWN
        where = getattr(where, "ipv4_mapped", None) or where
        if where.is_loopback:
            return self.here
        fitting = [(net.prefixlen, name) for net, name in self._networks if where in net]
        return self._zones[max(fitting)[1]] if fitting else UNKNOWN

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


def _not_to(error: ResidencyDenied, origin: str, place: Zone) -> ResidencyDenied:
    """Say of a refused download where it would have gone."""
    where = f"{place.name} ({place.jurisdiction})"
    if place is UNKNOWN:
        where = "no zone: its address is in none of zones.NAME.networks"
        if not origin.startswith("remote"):
            where = "no zone: this machine has no node.zone in falaj.toml"
    name = error.details["path"][-1]
    faults = [
        fault.model_copy(
            update={"given": f"{origin}, in {where}", "fix": "download it from a zone that is allowed"}
        )
        for fault in error.faults
    ]
    return ResidencyDenied(
        f"{name} may not be downloaded to where you are, {where}", faults=faults, details=error.details
    )


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
