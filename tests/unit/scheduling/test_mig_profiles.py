"""Which slices a GPU can be cut into, by NVIDIA's table of placements."""

from __future__ import annotations

import re
from itertools import combinations_with_replacement

import pytest

from falaj.scheduling.mig.profiles import (
    A30,
    A100_40,
    A100_80,
    H100_80,
    H200_141,
    MigGeometry,
    fault_of,
    geometry_of,
    geometry_of_profile,
    places,
    spelled,
)
from recorded_machines import FOLDER

GIB = 2**30


@pytest.mark.parametrize(
    ("model", "memory_bytes", "geometry"),
    [
        ("NVIDIA A100-SXM4-40GB", 42_505_273_344, A100_40),
        ("NVIDIA A100-SXM4-80GB", 81920 << 20, A100_80),
        ("NVIDIA A100 80GB PCIe", 85_899_345_920, A100_80),
        ("NVIDIA H100 80GB HBM3", 85_520_809_984, H100_80),
        ("NVIDIA H200", 150_754_820_096, H200_141),
        ("NVIDIA A30", 25_769_803_776, A30),
        ("Tesla T4", 16 << 30, None),
        ("NVIDIA H100 NVL", 100_000_000_000, None),
        ("", 0, None),
    ],
)
def test_a_gpu_is_known_by_its_model_and_memory(
    model: str, memory_bytes: int, geometry: MigGeometry | None
) -> None:
    assert geometry_of(model, memory_bytes) is geometry


def test_an_h200_says_the_same_of_itself() -> None:
    """What `nvidia-smi mig -lgip -lgipp` printed on one, with driver 580."""
    text = (FOLDER / "h200-mig-placements.txt").read_text()
    names = {ident: name for name, ident in re.findall(r"MIG (\S+) +(\d+) +\d/\d", text)}
    limits = {ident: int(most) for ident, most in re.findall(r"MIG \S+ +(\d+) +\d/(\d)", text)}
    found = re.findall(r"Profile ID +(\d+) Placements? ?: \{([\d,]+)\}:(\d)", text)

    assert {names[ident] for ident, _, _ in found} == set(H200_141.profiles)
    for ident, starts, size in found:
        profile = H200_141.profiles[names[ident]]
        assert (profile.starts, profile.memory) == (tuple(map(int, starts.split(","))), int(size))
        assert places([profile.name] * limits[ident], H200_141) is not None
        assert places([profile.name] * (limits[ident] + 1), H200_141) is None


def test_a_sliced_gpu_is_known_by_its_profiles() -> None:
    assert geometry_of_profile("NVIDIA A100-SXM4-40GB", "1g.5gb") is A100_40
    assert geometry_of_profile("NVIDIA A100-SXM4-80GB", "3g.40gb") is A100_80
    assert geometry_of_profile("NVIDIA A100-SXM4-40GB", "1g.10gb") is A100_40
    assert geometry_of_profile("NVIDIA A100-SXM4-80GB", "1g.10gb") is A100_80
    assert geometry_of_profile("NVIDIA H200", "1g.18gb.me") is H200_141
    assert geometry_of_profile("NVIDIA H200", "1g.10gb") is None
    assert spelled("1g.18gb.me") == "1g.18gb+me"


@pytest.mark.parametrize(
    ("geometry", "layout"),
    [
        (A100_40, {"1g.5gb": 7}),
        (A100_40, {"1g.10gb": 4}),
        (A100_40, {"2g.10gb": 3, "1g.5gb": 1}),
        (A100_40, {"4g.20gb": 1, "3g.20gb": 1}),
        (A100_80, {"3g.40gb": 2}),
        (A100_80, {"3g.40gb": 1, "1g.10gb": 4}),  # only if the large one is cut at the end
        (A100_80, {"3g.40gb": 1, "2g.20gb": 1, "1g.10gb": 1}),
        (A100_80, {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}),
        (H100_80, {"4g.40gb": 1, "2g.20gb": 1, "1g.10gb": 1}),
        (H100_80, {"1g.10gb+me": 1, "1g.10gb": 6}),
        (H200_141, {"7g.141gb": 1}),
        (H200_141, {"1g.18gb": 5, "1g.35gb": 1}),
        (A30, {"2g.12gb": 1, "1g.6gb": 2}),
    ],
)
def test_layouts_of_the_guide_are_possible(geometry: MigGeometry, layout: dict[str, int]) -> None:
    wanted = [name for name, count in layout.items() for _ in range(count)]

    found = places(wanted, geometry)

    assert found is not None
    assert fault_of(wanted, geometry) is None
    assert sorted(name for name, _ in found) == sorted(wanted)
    taken = [
        at
        for name, start in found
        for at in range(start, start + geometry.profiles[name].memory)
        if start in geometry.profiles[name].starts
    ]
    assert len(taken) == len(set(taken)) <= geometry.memory
    assert len(taken) == sum(geometry.profiles[name].memory for name in wanted)


@pytest.mark.parametrize(
    ("geometry", "layout", "words"),
    [
        (A100_40, {"1g.5gb": 8}, "8 × 1g.5gb do not fit on one A100-40GB"),
        (A100_80, {"3g.40gb": 1, "1g.10gb": 5}, "slices begin at fixed places"),
        (A100_80, {"1g.20gb": 4, "1g.10gb": 1}, "do not fit"),
        (A100_80, {"4g.40gb": 2}, "2 × 4g.40gb do not fit"),
        (H100_80, {"2g.20gb": 4}, "4 × 2g.20gb do not fit"),
        (H100_80, {"3g.40gb": 2, "1g.10gb": 1}, "do not fit"),
        (H100_80, {"7g.80gb": 1, "1g.10gb": 1}, "do not fit"),
        (H100_80, {"1g.10gb+me": 2}, r"at most 1 slice of 1g\.10gb\+me"),
        (H200_141, {"1g.10gb": 1}, r"H200-141GB has no profile 1g\.10gb; it has 1g\.18gb, "),
        (A30, {"2g.12gb": 2, "1g.6gb": 1}, "do not fit"),
    ],
)
def test_layouts_that_are_not_possible_are_refused(
    geometry: MigGeometry, layout: dict[str, int], words: str
) -> None:
    wanted = [name for name, count in layout.items() for _ in range(count)]

    assert places(wanted, geometry) is None
    assert re.search(words, fault_of(wanted, geometry) or "")


@pytest.mark.parametrize("geometry", [A30, H100_80])
def test_every_part_of_a_possible_layout_is_possible(geometry: MigGeometry) -> None:
    names = list(geometry.profiles)
    possible = [
        each
        for size in range(1, geometry.compute + 1)
        for each in combinations_with_replacement(names, size)
        if places(each, geometry) is not None
    ]

    known = {tuple(sorted(each)) for each in possible}
    for layout in possible:
        for without in range(len(layout)):
            part = tuple(sorted((*layout[:without], *layout[without + 1 :])))
            assert not part or part in known


def test_the_smallest_profile_for_a_share_and_its_memory() -> None:
    card = 80 * GIB

    def smallest(thousandths: int, gib: int) -> str | None:
        return A100_80.smallest(thousandths=thousandths, memory_bytes=gib * GIB, card_bytes=card)

    assert smallest(100, 8) == "1g.10gb"
    assert smallest(100, 10) == "1g.20gb"  # a slice has a little less than its name says
    assert smallest(100, 15) == "1g.20gb"
    assert smallest(250, 8) == "2g.20gb"
    assert smallest(100, 30) == "3g.40gb"
    assert smallest(1000, 80) == "7g.80gb"
    assert smallest(100, 90) is None
