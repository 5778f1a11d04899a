"""MIG layouts: what the queue would need of the GPUs, and how it is told to NVIDIA's MIG manager."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from falaj.records.names import Name, ObjectId, TextRule
from falaj.records.record import Record
from falaj.records.scheduling.snapshot import Count, Profile

Slices = Annotated[tuple[Profile, ...], Field(max_length=8)]
"""The slices of one GPU by their profiles; none: it is whole."""


ConfigurationName = Annotated[
    str, TextRule("[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?", "a name of letters, digits and -_.", limit=63)
]
"""The name of a configuration that the MIG manager or the device plugin has; it becomes the value of a label."""


class CardSlices(Record):
    """The slices of a GPU of one machine, by its index; none: it is whole."""

    card: Count
    slices: Slices = ()


class GpuSettings(Record):
    """How the GPUs of a node are cut and shared.

    On a cluster by the names of configurations: `mig` of the MIG manager, `sharing` of the device plugin. On one
    machine by the slices of its `cards`.
    """

    mig: ConfigurationName | None = None
    sharing: ConfigurationName | None = None
    cards: tuple[CardSlices, ...] = ()


class GpuConfiguration(Record):
    """A node whose GPUs are to be cut or shared differently. `before` restores what it was."""

    node: Name
    settings: GpuSettings
    before: GpuSettings


class ProfileDemand(Record):
    """What jobs ask for of a profile, or of whole GPUs if it is none.

    `waiting` counts the GPUs or slices of waiting jobs, `free` those that no job holds, `recent` the jobs of the last
    days.
    """

    profile: Profile | None = None
    waiting: Count = 0
    free: Count = 0
    recent: Count = 0


class CardLayout(Record):
    """A GPU that should be cut differently. On a cluster `card` is a number of ours: it does not say which is which."""

    node: Name
    card: Count
    model: str
    now: Slices = ()
    then: Slices = ()


class ShareAdvice(Record):
    """A job that waits for a share of a GPU, and the profile that would hold it."""

    job: ObjectId
    profile: Profile


class MigDevices(Record):
    """The layout of some GPUs of a node, as mig-parted writes it: counts of slices by profile, without any if whole."""

    devices: tuple[Count, ...]
    slices: dict[str, Count] = {}


class MigPlan(Record):
    """The layouts that would let waiting jobs start.

    `cards` are the GPUs to cut differently, none of which a job holds. `helped` are the jobs that could start then,
    `unserved` those that no layout of idle GPUs serves, and `in_the_way` the running jobs on GPUs that could be cut for
    those. `configurations` are the layouts of whole nodes by name, and `nodes` says which node should have which.
    """

    demand: tuple[ProfileDemand, ...] = ()
    cards: tuple[CardLayout, ...] = ()
    helped: tuple[ObjectId, ...] = ()
    unserved: tuple[ObjectId, ...] = ()
    in_the_way: tuple[ObjectId, ...] = ()
    shares: tuple[ShareAdvice, ...] = ()
    configurations: dict[str, tuple[MigDevices, ...]] = {}
    nodes: dict[str, str] = {}
