"""The MIG profiles of NVIDIA's GPUs, and where on a GPU each can be cut.

A GPU has 8 memory slices (an A30 has 4), and a profile takes a run of them that begins at one of a few places. Which
combinations are possible follows from that, and from nothing else. The places are those that `nvidia-smi mig -lgipp`
prints, and NVIDIA's MIG user guide draws.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

GIB = 2**30


@dataclass(frozen=True)
class MigProfile:
    """A profile: the compute slices and memory slices that it takes, and the memory slices that it may begin at."""

    name: str
    compute: int
    memory: int
    starts: tuple[int, ...]
    limit: int | None = None
    """At most so many on one GPU, if that is fewer than fit."""


@dataclass(frozen=True)
class MigGeometry:
    """The GPUs of one kind: how many compute and memory slices they have, and their profiles by name."""

    name: str
    compute: int
    memory: int
    profiles: Mapping[str, MigProfile]

    def __hash__(self) -> int:
        return hash(self.name)

    def smallest(self, *, thousandths: int, memory_bytes: int, card_bytes: int) -> str | None:
        """Return the smallest profile with this part of the compute and this memory of a card; none if none has."""
        fitting = [
            each
            for each in self.profiles.values()
            if each.compute * 1000 >= thousandths * self.compute
            and self._memory_bytes(each, card_bytes) >= memory_bytes
            and each.limit is None
        ]
        return min(fitting, key=lambda each: (each.compute, each.memory)).name if fitting else None

    def _memory_bytes(self, profile: MigProfile, card_bytes: int) -> int:
        """Return what a slice has at least: a 1g.18gb of an H200 has 16 GiB of its 140."""
        part = card_bytes * profile.memory // self.memory
        return part if profile.memory == self.memory else part * 9 // 10


def _seven(name: str, sizes: tuple[str, str, str, str, str]) -> MigGeometry:
    """Return a GPU of 7 compute slices, from the memory in the names of its profiles 1g, 1g double, 2g, 3g/4g, 7g."""
    one, double, two, half, whole = sizes
    profiles = [
        MigProfile(f"1g.{one}gb", 1, 1, (0, 1, 2, 3, 4, 5, 6)),
        MigProfile(f"1g.{one}gb+me", 1, 1, (0, 1, 2, 3, 4, 5, 6), limit=1),
        MigProfile(f"1g.{double}gb", 1, 2, (0, 2, 4, 6)),
        MigProfile(f"2g.{two}gb", 2, 2, (0, 2, 4)),
        MigProfile(f"3g.{half}gb", 3, 4, (0, 4)),
        MigProfile(f"4g.{half}gb", 4, 4, (0,)),
        MigProfile(f"7g.{whole}gb", 7, 8, (0,)),
    ]
    return MigGeometry(name, 7, 8, {each.name: each for each in profiles})


A30 = MigGeometry(
    "A30-24GB",
    4,
    4,
    {
        each.name: each
        for each in (
            MigProfile("1g.6gb", 1, 1, (0, 1, 2, 3)),
            MigProfile("1g.6gb+me", 1, 1, (0, 1, 2, 3), limit=1),
            MigProfile("2g.12gb", 2, 2, (0, 2)),
            MigProfile("4g.24gb", 4, 4, (0,)),
        )
    },
)
A100_40 = _seven("A100-40GB", ("5", "10", "10", "20", "40"))
A100_80 = _seven("A100-80GB", ("10", "20", "20", "40", "80"))
H100_80 = _seven("H100-80GB", ("10", "20", "20", "40", "80"))
H200_141 = _seven("H200-141GB", ("18", "35", "35", "71", "141"))

KNOWN = (
    ("A30", 20, 26, A30),
    ("A100", 38, 42, A100_40),
    ("A100", 76, 82, A100_80),
    ("H100", 76, 82, H100_80),
    ("H200", 135, 145, H200_141),
)
"""Words in the model, the least and the most GiB or GB of memory, and the geometry."""


def geometry_of(model: str, memory_bytes: int) -> MigGeometry | None:
    """Return the geometry of a whole GPU by its model and memory; none for one that has no MIG, or is not known."""
    words = model.upper().replace("-", " ").split()
    for word, least, most, geometry in KNOWN:
        if word in words and least * 1e9 <= memory_bytes <= most * GIB:
            return geometry
    return None


def geometry_of_profile(model: str, profile: str) -> MigGeometry | None:
    """Return the geometry of a GPU by a slice of it: its model, and the name of its profile."""
    words, name = model.upper().replace("-", " ").split(), spelled(profile)
    found = [each for word, _, _, each in KNOWN if word in words and name in each.profiles]
    sized = [
        each for each in found if each.name.split("-")[1] in words
    ]  # 1g.10gb is of an A100 with 40 GB or 80 GB
    return next(iter([*sized, *reversed(found)]), None)


def spelled(profile: str) -> str:
    """Return a profile as nvidia-smi writes it: resources of the device plugin end in .me instead of +me."""
    return f"{profile.removesuffix('.me')}+me" if profile.endswith(".me") else profile


def places(profiles: Iterable[str], geometry: MigGeometry) -> tuple[tuple[str, int], ...] | None:
    """Return where each slice of a layout begins, in the order in which to cut them; none if they do not fit."""
    counted = tuple(sorted(Counter(profiles).items()))
    if any(name not in geometry.profiles for name, _ in counted):
        return None
    found = _places(counted, geometry)
    return None if found is None else tuple(sorted(found, key=lambda each: (each[1], each[0])))


def fault_of(profiles: Iterable[str], geometry: MigGeometry) -> str | None:
    """Return why a GPU cannot be cut so; none if it can."""
    counted = Counter(profiles)
    unknown = sorted(name for name in counted if name not in geometry.profiles)
    if unknown:
        return f"{geometry.name} has no profile {unknown[0]}; it has {', '.join(geometry.profiles)}"
    for name, count in counted.items():
        limit = geometry.profiles[name].limit
        if limit is not None and count > limit:
            return f"{geometry.name} has at most {limit} slice of {name}"
    if places(counted.elements(), geometry) is not None:
        return None
    described = ", ".join(f"{count} × {name}" for name, count in sorted(counted.items()))
    return f"{described} do not fit on one {geometry.name}: slices begin at fixed places of its memory"


@lru_cache(maxsize=4096)
def _places(
    counted: tuple[tuple[str, int], ...], geometry: MigGeometry
) -> tuple[tuple[str, int], ...] | None:
    for name, count in counted:
        limit = geometry.profiles[name].limit
        if limit is not None and count > limit:
            return None
    wanted = [geometry.profiles[name] for name, count in counted for _ in range(count)]
    if sum(each.compute for each in wanted) > geometry.compute:
        return None
    if sum(each.memory for each in wanted) > geometry.memory:
        return None
    wanted.sort(key=lambda each: (-each.memory, -each.compute, each.name))
    return _search(wanted, 0)


def _search(wanted: list[MigProfile], taken: int) -> tuple[tuple[str, int], ...] | None:
    """Return the first way to place the profiles, the largest first, on the memory slices that are not taken."""
    if not wanted:
        return ()
    first, rest = wanted[0], wanted[1:]
    for start in first.starts:
        mask = ((1 << first.memory) - 1) << start
        if not taken & mask:
            found = _search(rest, taken | mask)
            if found is not None:
                return ((first.name, start), *found)
    return None
