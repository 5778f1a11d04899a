"""Which layouts of the idle GPUs would let the waiting jobs start, in the order of the queue. Pure."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from falaj.records.names import ObjectId
from falaj.records.scheduling.mig import CardLayout, MigDevices, MigPlan, ProfileDemand, ShareAdvice
from falaj.records.scheduling.snapshot import WHOLE_GPU, Node, Request
from falaj.scheduling.capacity.cluster import Cluster
from falaj.scheduling.capacity.resources import rank
from falaj.scheduling.mig.cards import MigCard
from falaj.scheduling.mig.profiles import places, spelled

MOST_IN_THE_WAY = 50


@dataclass
class CardDraft:
    """A card while the plan is made: `promised` are its devices for jobs that need no change, `then` its new slices."""

    card: MigCard
    promised: Counter[str | None] = field(default_factory=Counter)
    then: tuple[str, ...] | None = None
    used: int = 0
    """How many of the new slices are for waiting jobs; a whole card counts one."""

    @property
    def is_idle(self) -> bool:
        return not self.card.jobs and not self.promised

    def layout(self) -> CardLayout:
        card = self.card
        return CardLayout(
            node=card.node, card=card.index, model=card.model, now=card.slices, then=self.then or ()
        )

    def copy(self) -> CardDraft:
        return CardDraft(self.card, Counter(self.promised), self.then, self.used)


def plan_layouts(
    cards: Sequence[MigCard],
    nodes: Iterable[Node],
    pending: Iterable[Request],
    recent: Mapping[str | None, int],
) -> MigPlan:
    """Return the plan. Jobs are served in the order of priority and submission, each whole or not at all.

    CPUs, memory and quotas are not counted: the plan says what the GPUs lack.
    """
    cluster, drafts = Cluster(nodes), [CardDraft(card) for card in cards]
    helped, unserved, in_the_way, shares = [], [], dict[ObjectId, None](), []
    waiting: Counter[str | None] = Counter()
    for request in sorted(pending, key=rank):
        if not request.each.gpus:
            continue
        if request.each.gpu_milli < WHOLE_GPU:
            shares += _advice(request, cards)
            continue
        wanted = None if request.each.gpu_profile is None else spelled(request.each.gpu_profile)
        count = request.replicas * request.each.gpus
        waiting[wanted] += count
        there = {cluster.nodes[index].name for index in cluster.permitted(request, even_cordoned=True)}
        usable = [each for each in drafts if _is_usable(each.card, request, there)]
        if _promise(usable, wanted, count):
            continue
        if _cut(usable, wanted, count):
            helped.append(request.job)
        else:
            unserved.append(request.job)
            in_the_way |= dict.fromkeys(
                job for each in usable if _can_hold(each.card, wanted) for job in sorted(each.card.jobs)
            )
    _fill(drafts, waiting, recent)
    changed = [each for each in drafts if each.then is not None and each.then != each.card.slices]
    configurations, labels = node_configurations(drafts, {each.card.node for each in changed})
    return MigPlan(
        demand=_demand(cards, waiting, recent),
        cards=tuple(each.layout() for each in changed),
        helped=tuple(helped),
        unserved=tuple(unserved),
        in_the_way=tuple(in_the_way)[:MOST_IN_THE_WAY],
        shares=tuple(shares),
        configurations=configurations,
        nodes=labels,
    )


def _demand(
    cards: Iterable[MigCard], waiting: Mapping[str | None, int], recent: Mapping[str | None, int]
) -> tuple[ProfileDemand, ...]:
    free: Counter[str | None] = Counter()
    for card in cards:
        free.update(card.free)
    names = sorted({*waiting, *free, *recent}, key=lambda each: (each is not None, each or ""))
    return tuple(
        ProfileDemand(profile=each, waiting=waiting.get(each, 0), free=free[each], recent=recent.get(each, 0))
        for each in names
    )


def _is_usable(card: MigCard, request: Request, nodes: set[str]) -> bool:
    models = request.each.gpu_models
    return card.node in nodes and (models is None or card.model in models)


def _can_hold(card: MigCard, wanted: str | None) -> bool:
    return wanted is None or wanted in card.geometry.profiles


def _promise(usable: Sequence[CardDraft], wanted: str | None, count: int) -> bool:
    """Promise free devices to a job that needs no change; it may wait for something else."""
    chosen: list[tuple[CardDraft, int]] = []
    for each in usable:
        left = 0 if each.then is not None else each.card.free.get(wanted, 0) - each.promised[wanted]
        if count and left > 0:
            chosen.append((each, min(left, count)))
            count -= min(left, count)
    if count:
        return False
    for each, part in chosen:
        each.promised[wanted] += part
    return True


def _cut(usable: Sequence[CardDraft], wanted: str | None, count: int) -> bool:
    """Cut idle cards for a job, as few as possible; all or nothing."""
    before = [(each, each.copy()) for each in usable]
    for _ in range(count):
        draft = next((each for each in usable if _has_room(each, wanted)), None) or _idle(usable, wanted)
        if draft is None:
            for each, copy in before:
                each.promised, each.then, each.used = copy.promised, copy.then, copy.used
            return False
        draft.then = () if wanted is None else tuple(sorted((*(draft.then or ()), wanted)))
        draft.used += 1
    return True


def _has_room(draft: CardDraft, wanted: str | None) -> bool:
    """Return whether a card that is being cut can have one more slice."""
    return (
        wanted is not None
        and bool(draft.then)
        and places([*(draft.then or ()), wanted], draft.card.geometry) is not None
    )


def _idle(usable: Sequence[CardDraft], wanted: str | None) -> CardDraft | None:
    """Return an idle card that can be cut, one that is cut already first; none if there is none."""
    idle = [
        each
        for each in usable
        if each.is_idle
        and each.then is None
        and _can_hold(each.card, wanted)
        and (each.card.slices or wanted)
    ]
    return min(idle, key=lambda each: (not each.card.slices, each.card.node, each.card.index), default=None)


def _fill(
    drafts: Iterable[CardDraft], waiting: Mapping[str | None, int], recent: Mapping[str | None, int]
) -> None:
    """Fill the rest of each card that is cut with what is asked for most, so that nothing of it is idle."""
    for draft in drafts:
        if not draft.then:
            continue
        geometry = draft.card.geometry
        liked = sorted(
            (each for each in geometry.profiles.values() if each.limit is None),
            key=lambda each: (
                -waiting.get(each.name, 0) - recent.get(each.name, 0),
                each.memory,
                each.name,
            ),
        )
        for profile in liked:
            while places([*draft.then, profile.name], geometry) is not None:
                draft.then = tuple(sorted((*draft.then, profile.name)))


def _advice(request: Request, cards: Sequence[MigCard]) -> list[ShareAdvice]:
    each = request.each
    for card in cards:
        found = card.geometry.smallest(
            thousandths=each.gpu_milli, memory_bytes=each.gpu_memory_bytes, card_bytes=card.memory_bytes
        )
        if found is not None:
            return [ShareAdvice(job=request.job, profile=found)]
    return []


# ------------------------------------------------------------------------------------ configurations by name


def node_configurations(
    drafts: Iterable[CardDraft], nodes: Iterable[str]
) -> tuple[dict[str, tuple[MigDevices, ...]], dict[str, str]]:
    """Return the layouts of whole nodes by name, and the name for each node; equal layouts have one name."""
    by_node: dict[str, dict[int, tuple[str, ...]]] = {name: {} for name in sorted(nodes)}
    for each in drafts:
        if each.card.node in by_node:
            chosen = each.card.slices if each.then is None else each.then
            by_node[each.card.node][each.card.index] = chosen
    named: dict[str, tuple[MigDevices, ...]] = {}
    labels = {}
    for node, layouts in by_node.items():
        made = devices_of_layouts(layouts)
        labels[node] = configuration_name(made)
        named[labels[node]] = made
    return named, labels


def devices_of_layouts(layouts: Mapping[int, tuple[str, ...]]) -> tuple[MigDevices, ...]:
    """Return the layouts of the cards of a node, those that are alike together."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for index, slices in sorted(layouts.items()):
        alike.setdefault(tuple(sorted(slices)), []).append(index)
    return tuple(
        MigDevices(devices=tuple(indexes), slices=dict(sorted(Counter(slices).items())))
        for slices, indexes in alike.items()
    )


def configuration_name(devices: Iterable[MigDevices]) -> str:
    """Return a name that is the same for the same layout."""
    text = json.dumps([each.model_dump(mode="json") for each in devices])
    return f"falaj-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
