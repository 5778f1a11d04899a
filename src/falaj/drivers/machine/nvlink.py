"""NVLink islands: cards that NVLink connects, directly or through NVSwitches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from falaj.drivers.machine.nvml import pci_address, query, to_text

MAX_LINKS = 18
TO_A_GPU, TO_A_SWITCH = 0, 2  # NVML_NVLINK_DEVICE_TYPE_*
ALL_SWITCHES = "switches"


def find_islands(nvml: Any, handles: Sequence[Any], addresses: Sequence[str]) -> list[int]:
    """Return the island number of each card, from 0 in the given order. A card without links is its own island."""
    leader = list(range(len(handles)))

    def first(card: int) -> int:
        while leader[card] != card:
            card = leader[card]
        return card

    for one, other in connected_pairs(nvml, handles, addresses):
        low, high = sorted((first(one), first(other)))
        leader[high] = low
    found = [first(card) for card in range(len(handles))]
    numbers = {island: number for number, island in enumerate(dict.fromkeys(found))}
    return [numbers[island] for island in found]


def connected_pairs(nvml: Any, handles: Sequence[Any], addresses: Sequence[str]) -> list[tuple[int, int]]:
    """Return the pairs of cards that NVLink connects.

    The driver is queried for each pair. If it does not know, two cards are connected if they have a link to each other,
    or each to a switch.
    """
    ends = [link_ends(nvml, handle) for handle in handles]
    pairs = []
    for one in range(len(handles)):
        for other in range(one + 1, len(handles)):
            direct = p2p_by_nvlink(nvml, handles[one], handles[other])
            linked = addresses[other] in ends[one] or addresses[one] in ends[other]
            switched = ALL_SWITCHES in ends[one] and ALL_SWITCHES in ends[other]
            if direct or (direct is None and (linked or switched)):
                pairs.append((one, other))
    return pairs


def p2p_by_nvlink(nvml: Any, one: Any, other: Any) -> bool | None:
    """Return whether the driver reports peer-to-peer access over NVLink; none if it does not know."""
    index = getattr(nvml, "NVML_P2P_CAPS_INDEX_NVLINK", None)
    status = None if index is None else query(nvml, "nvmlDeviceGetP2PStatus", one, other, index)
    return None if status is None else bool(status == nvml.NVML_P2P_STATUS_OK)


def link_ends(nvml: Any, handle: Any) -> set[str]:
    """Return the remote ends of the card's links: PCI addresses of cards, or switches."""
    ends = set()
    for link in links_up(nvml, handle):
        kind = query(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        remote = query(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
        if kind == TO_A_SWITCH:
            ends.add(ALL_SWITCHES)
        elif kind in (TO_A_GPU, None) and remote is not None:
            ends.add(pci_address(to_text(remote.busId)))
    return ends


def links_up(nvml: Any, handle: Any) -> list[int]:
    """Return the numbers of the active links."""
    return [link for link in range(MAX_LINKS) if query(nvml, "nvmlDeviceGetNvLinkState", handle, link) == 1]
