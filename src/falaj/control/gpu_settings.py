"""How the GPUs of a node are cut and shared: by labels of a cluster's node, or by the tool of one machine."""

from __future__ import annotations

from falaj.errors import Fault, InvalidInput
from falaj.ports.cluster.maintenance import MIG_CONFIG, MIG_STATE, PLUGIN_CONFIG, NodeMaintenance
from falaj.ports.machine.hardware import MigTool, NodeFacts, Places
from falaj.records.scheduling.hardware import GpuCard
from falaj.records.scheduling.mig import CardSlices, GpuSettings
from falaj.scheduling.mig.profiles import fault_of, geometry_of, places, spelled


def set_labels(
    maintenance: NodeMaintenance, node: str, facts: NodeFacts, settings: GpuSettings
) -> GpuSettings:
    """Label a node of a cluster, and return what its labels were."""
    if settings.cards or not (settings.mig or settings.sharing):
        raise InvalidInput.at(
            "settings",
            given="cards" if settings.cards else "nothing",
            allowed="on a cluster the name of a configuration: mig or sharing",
            fix=f"falaj nodes configure-gpus {node} --mig NAME",
        )
    there = facts.cluster
    before = GpuSettings(
        mig=there.mig_config if there is not None and settings.mig else None,
        sharing=there.sharing_config if there is not None and settings.sharing else None,
    )
    labels: dict[str, str | None] = {}
    if settings.mig:
        labels |= {MIG_CONFIG: settings.mig, MIG_STATE: None}  # the MIG manager writes the state anew
    if settings.sharing:
        labels[PLUGIN_CONFIG] = settings.sharing
    maintenance.label(node, labels)
    return before


def cut_cards(mig: MigTool, facts: NodeFacts, settings: GpuSettings) -> GpuSettings:
    """Cut the cards of a machine, and return what they were."""
    if settings.mig or settings.sharing or not settings.cards:
        raise InvalidInput.at(
            "settings",
            given="a configuration of a cluster" if settings.mig or settings.sharing else "nothing",
            allowed="on one machine the slices of its cards",
            fix=f"falaj nodes configure-gpus {facts.name} --card 0=1g.10gb:7",
        )
    known = {card.index: card for card in facts.cards}
    wanted, before, faults = dict[GpuCard, Places](), dict[GpuCard, Places](), list[Fault]()
    for number, each in enumerate(settings.cards):
        card = known.get(each.card)
        geometry = None if card is None else geometry_of(card.model, card.memory_bytes)
        if card is None or geometry is None:
            said = "a GPU of this machine that MIG can cut"
            faults.append(Fault(where=f"settings.cards.{number}", given=str(each.card), allowed=said))
        elif (fault := fault_of(each.slices, geometry)) is not None:
            faults.append(Fault(where=f"settings.cards.{number}", allowed=fault))
        else:
            wanted[card] = places(each.slices, geometry) or ()
            before[card] = places([spelled(one.profile) for one in card.slices], geometry) or ()
    if faults:
        raise InvalidInput("the GPUs cannot be cut so", faults=faults)
    mig.cut(wanted, before=before)
    kept = [
        CardSlices(card=card.index, slices=tuple(name for name, _ in now)) for card, now in before.items()
    ]
    return GpuSettings(cards=tuple(kept))
