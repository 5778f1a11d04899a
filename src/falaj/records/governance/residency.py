"""Data residency: zones, jurisdictions, and labels that only get stricter along lineage."""

from __future__ import annotations

from collections.abc import Iterable

from falaj.records.names import DataClass, Jurisdiction, Name
from falaj.records.record import Record

NOWHERE = "ZZ"
"""The code of a place that is not known (ISO 3166): no restriction permits it."""


class Zone(Record):
    """A place for bytes and compute, under one jurisdiction."""

    name: Name
    jurisdiction: Jurisdiction
    default: bool = False


class Label(Record):
    """A restriction on where an object's bytes may lie (`only`; none: anywhere), and the classes of its data."""

    only: frozenset[Jurisdiction] | None = None
    classes: frozenset[DataClass] = frozenset()

    def permits(self, jurisdiction: str) -> bool:
        return self.only is None or (jurisdiction in self.only and jurisdiction != NOWHERE)

    def __or__(self, other: Label) -> Label:
        """Both restrictions at once."""
        if self.only is None or other.only is None:
            only = self.only if other.only is None else other.only
        else:
            only = self.only & other.only
        return Label(only=only, classes=self.classes | other.classes)

    def describe(self) -> str:
        where = (
            "any jurisdiction" if self.only is None else "only " + (", ".join(sorted(self.only)) or "nowhere")
        )
        return f"{where}; {', '.join(sorted(self.classes))}" if self.classes else where


UNRESTRICTED = Label()
UNKNOWN = Zone(name="unknown", jurisdiction=NOWHERE)
"""Where a machine is that names no zone, and a caller whose address is in none: only what has no restriction may go."""


def union(labels: Iterable[Label]) -> Label:
    """The restriction that satisfies every one of `labels`."""
    combined = UNRESTRICTED
    for label in labels:
        combined = combined | label
    return combined
