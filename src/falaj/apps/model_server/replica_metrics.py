"""Metrics of all replicas from any of them: each writes its own to a file, and the one that is asked adds the others'.

A replica continues the counters of the one that had its name before, so that no counter ever goes backwards: what was
shown once is in the file. Counters of replicas that have ended stay; their gauges do not.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

STALE_S = 5.0
"""A replica whose file is older does not run; each writes it every second."""
GROWING = ("counter", "histogram", "summary")
LARGEST_FILE = 64 * 2**20

_log = logging.getLogger(__name__)


@dataclass
class MetricFamily:
    """A metric with its samples: their values by name and labels, as they stand in the text."""

    head: list[str]
    kind: str = "untyped"
    samples: dict[str, float] = field(default_factory=dict)

    @property
    def grows(self) -> bool:
        return self.kind in GROWING


Families = dict[str, MetricFamily]


class ReplicaSnapshot(NamedTuple):
    """What another replica wrote."""

    name: str
    is_running: bool
    families: Families
    load: str


class ReplicaMetrics:
    """The metrics of this replica and of those beside it, in a folder that they share."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        before = self._read(self._path(name))
        self._before = {} if before is None else {k: v for k, v in before.families.items() if v.grows}

    def store(self, text: str, load: str) -> str:
        """Write the metrics of this replica for the others; return them with those of its predecessors."""
        families = read_families(text)
        for name, family in self._before.items():
            own = families.setdefault(name, MetricFamily(family.head, family.kind))
            for key, value in family.samples.items():
                own.samples[key] = own.samples.get(key, 0.0) + value
        continued = write_families(families)
        draft = self._path(self._name).with_suffix(".new")
        try:
            draft.write_text(json.dumps({"text": continued, "load": load}))
            draft.rename(self._path(self._name))
        except OSError as error:
            _log.warning("the metrics of this replica could not be written: %s", error)
        return continued

    def combined(self, text: str, load: str) -> str:
        """Return the metrics of all replicas, each with the label `replica`."""
        found = [(self._name, read_families(self.store(text, load)))]
        for other in self.others():
            shown = other.families.items()
            found.append((other.name, {k: v for k, v in shown if other.is_running or v.grows}))
        merged: Families = {}
        for replica, families in sorted(found):
            for name, family in families.items():
                own = merged.setdefault(name, MetricFamily(family.head, family.kind))
                own.samples |= {labelled(key, replica): value for key, value in family.samples.items()}
        return write_families(merged)

    def others(self) -> Iterator[ReplicaSnapshot]:
        """Return what the other replicas wrote, those that have ended included."""
        for path in sorted(self._folder.glob("*.json")):
            if path.stem != self._name and (found := self._read(path)) is not None:
                yield found

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _read(self, path: Path) -> ReplicaSnapshot | None:
        try:
            facts = os.stat(path)
            if facts.st_size > LARGEST_FILE:
                return None
            found = json.loads(path.read_text())
            families = read_families(found["text"])
            return ReplicaSnapshot(
                path.stem, time.time() - facts.st_mtime < STALE_S, families, str(found["load"])
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # it is not there, or was cut off by a full disk


def read_families(text: str) -> Families:
    """Read the text format of Prometheus, as this server writes it. Raise ValueError if it is something else."""
    found: Families = {}
    current = MetricFamily([])
    for line in text.split("\n"):  # splitlines would split values of labels
        if line.startswith("# "):
            _, word, name, *rest = line.split(" ", 3)
            current = found.setdefault(name, MetricFamily([]))
            current.head.append(line)
            if word == "TYPE":
                current.kind = " ".join(rest)
        elif line:
            key, _, value = line.rpartition(" ")
            current.samples[key] = float(value)
    return found


def write_families(families: Families) -> str:
    return "".join(f"{line}\n" for family in families.values() for line in _lines(family))


def _lines(family: MetricFamily) -> Iterable[str]:
    yield from family.head
    for key, value in family.samples.items():
        yield f"{key} {value!r}"


def labelled(key: str, replica: str) -> str:
    """Return the name and labels of a sample with the label `replica`, if it does not have it."""
    name, bracket, labels = key.partition("{")
    if not bracket:
        return f'{name}{{replica="{replica}"}}'
    if 'replica="' in labels:
        return key
    return f'{name}{{replica="{replica}",{labels}'
