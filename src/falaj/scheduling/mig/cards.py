"""The GPUs of the nodes as cards that can be cut: what is cut now, what is free, and who holds the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from falaj.ports.machine.hardware import NodeFacts
from falaj.records.names import ObjectId
from falaj.records.scheduling.snapshot import Gpu, Node, RunningJob
from falaj.scheduling.mig.profiles import MigGeometry, geometry_of, geometry_of_profile, places, spelled


@dataclass(frozen=True)
class MigCard:
    """A GPU that can be cut. `slices` are its profiles now; none: it is whole.

    `free` counts what no job holds, by profile. `jobs` are those that end if it is cut: on a cluster all with GPUs on
    its node, because the MIG manager changes a node as a whole.
    """

    node: str
    index: int
    model: str
    memory_bytes: int
    geometry: MigGeometry
    slices: tuple[str, ...]
    free: Mapping[str | None, int]
    jobs: frozenset[ObjectId]


def mig_cards(machines: Iterable[tuple[NodeFacts, Node]], running: Iterable[RunningJob]) -> list[MigCard]:
    """Return the GPUs of all nodes that MIG can cut, by node and number."""
    holders: dict[str, set[ObjectId]] = {}
    for each in running:
        for placed in each.placements:
            for gpu in placed.gpus:
                holders.setdefault(gpu, set()).add(each.request.job)
    found = []
    for facts, node in machines:
        found += _of_machine(facts, node, holders) if facts.cards else _of_cluster(node, holders)
    return found


def _of_machine(facts: NodeFacts, node: Node, holders: Mapping[str, set[ObjectId]]) -> list[MigCard]:
    """Return the cards of a machine, whose driver says which slice is on which."""
    made = []
    for card in sorted(facts.cards, key=lambda each: each.index):
        geometry = geometry_of(card.model, card.memory_bytes)
        if geometry is None or any(spelled(each.profile) not in geometry.profiles for each in card.slices):
            continue
        devices = [(each.id, spelled(each.profile)) for each in card.slices]
        idents = [ident for ident, _ in devices] or [card.id]
        held = {job for ident in idents for job in holders.get(ident, ())}
        free: Counter[str | None] = Counter(profile for ident, profile in devices if ident not in holders)
        if not card.is_sliced and card.id not in holders:
            free[None] = 1
        slices = tuple(sorted(profile for _, profile in devices))
        made.append(
            MigCard(
                node=node.name,
                index=card.index,
                model=card.model,
                memory_bytes=card.memory_bytes,
                geometry=geometry,
                slices=slices,
                free=free,
                jobs=frozenset(held),
            )
        )
    return made


def _of_cluster(node: Node, holders: Mapping[str, set[ObjectId]]) -> list[MigCard]:
    """Return the cards of a node that only counts its GPUs and slices.

    Slices are thought to fill one card after another. Shared GPUs and those of other kinds are left out, and nodes on
    which others than this platform hold GPUs: they are not asked to leave.
    """
    if node.others is not None and node.others.gpus:
        return []
    jobs = frozenset(job for gpu in node.gpus for job in holders.get(gpu.id, ()))
    groups: list[tuple[list[Gpu], MigGeometry]] = []
    for gpu in sorted(node.gpus, key=lambda each: (each.profile or "", each.id)):
        geometry = _geometry(gpu)
        if geometry is None:
            continue
        together = [*groups[-1][0], gpu] if groups and gpu.profile and groups[-1][1] is geometry else None
        fits = together is not None and all(each.profile for each in together)
        if fits and together and places([spelled(str(each.profile)) for each in together], geometry):
            groups[-1] = together, geometry
        else:
            groups.append(([gpu], geometry))
    return [
        MigCard(
            node=node.name,
            index=index,
            model=gpus[0].model,
            memory_bytes=_card_bytes(gpus[0], geometry),
            geometry=geometry,
            slices=tuple(sorted(spelled(each.profile) for each in gpus if each.profile)),
            free=Counter(
                None if each.profile is None else spelled(each.profile)
                for each in gpus
                if each.id not in holders
            ),
            jobs=jobs,
        )
        for index, (gpus, geometry) in enumerate(groups)
    ]


def _geometry(gpu: Gpu) -> MigGeometry | None:
    if gpu.profile is None:
        return geometry_of(gpu.model, gpu.memory_bytes)
    return geometry_of_profile(gpu.model, gpu.profile)


def _card_bytes(gpu: Gpu, geometry: MigGeometry) -> int:
    if gpu.profile is None:
        return gpu.memory_bytes
    return gpu.memory_bytes * geometry.memory // geometry.profiles[spelled(gpu.profile)].memory
