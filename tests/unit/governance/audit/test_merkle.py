"""The Merkle tree against the naive recursion of RFC 6962, its published vectors, and every small tampering."""

from __future__ import annotations

from hashlib import sha256
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from falaj.governance.audit.merkle import (
    Frontier,
    consistency_proof,
    inclusion_proof,
    leaf_hash,
    node_hash,
    verify_consistency,
    verify_inclusion,
)

LIMIT = 20
LEAVES = [leaf_hash(bytes([number])) for number in range(LIMIT)]

# The test vectors that implementations of certificate transparency share.
CT_LEAVES = [
    "",
    "00",
    "10",
    "2021",
    "3031",
    "40414243",
    "5051525354555657",
    "606162636465666768696a6b6c6d6e6f",
]
CT_ROOTS = [
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
CT_INCLUSION = {
    (0, 8): [
        "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4",
    ],
    (5, 8): [
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ],
}
CT_CONSISTENCY = {
    (1, 1): [],
    (1, 8): CT_INCLUSION[0, 8],
    (6, 8): [
        "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ],
    (2, 5): [
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
    ],
}


def naive_root(leaves: list[bytes]) -> bytes:
    """MTH of RFC 6962, 2.1, literally."""
    if not leaves:
        return sha256(b"").digest()
    if len(leaves) == 1:
        return leaves[0]
    split = max(power for power in (2**bit for bit in range(64)) if power < len(leaves))
    return node_hash(naive_root(leaves[:split]), naive_root(leaves[split:]))


ROOTS = [naive_root(LEAVES[:size]) for size in range(LIMIT + 1)]


def flipped(value: bytes, at: int) -> bytes:
    return value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]


def test_leaves_and_nodes_are_hashed_with_different_prefixes() -> None:
    assert leaf_hash(b"data") == sha256(b"\x00data").digest()
    assert node_hash(b"l" * 32, b"r" * 32) == sha256(b"\x01" + b"l" * 32 + b"r" * 32).digest()


def test_published_vectors() -> None:
    leaves = [leaf_hash(bytes.fromhex(data)) for data in CT_LEAVES]

    roots = [Frontier().extend(leaves[:size]).root().hex() for size in range(9)]
    inclusion = {key: [each.hex() for each in inclusion_proof(leaves, *key)] for key in CT_INCLUSION}
    consistency = {key: [each.hex() for each in consistency_proof(leaves, *key)] for key in CT_CONSISTENCY}

    assert roots == CT_ROOTS
    assert inclusion == CT_INCLUSION
    assert consistency == CT_CONSISTENCY


@given(st.lists(st.binary(max_size=4), max_size=80), st.integers(0, 80))
def test_frontier_root_equals_the_naive_root_for_any_batching(data: list[bytes], cut: int) -> None:
    leaves = [leaf_hash(each) for each in data]

    one_by_one = Frontier()
    for leaf in leaves:
        one_by_one = one_by_one.append(leaf)
    in_two_parts = Frontier().extend(leaves[:cut]).extend(iter(leaves[cut:]))

    assert one_by_one == in_two_parts
    assert one_by_one.size == len(leaves)
    assert one_by_one.root() == naive_root(leaves)


def test_append_does_not_change_the_old_frontier() -> None:
    old = Frontier().extend(LEAVES[:7])

    old.append(LEAVES[7])

    assert old == Frontier().extend(LEAVES[:7])


@given(st.integers(0, LIMIT))
def test_frontier_round_trips_through_text(size: int) -> None:
    frontier = Frontier().extend(LEAVES[:size])

    assert Frontier.from_text(frontier.to_text()) == frontier


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "0",
        "1:",
        "-1:",
        "0:\n",
        "01:" + "00" * 32,
        "٣:" + "00" * 64,
        "2:" + "00" * 64,
        "1:" + "0G" * 32,
        "1:" + "AB" * 32,
        "1:" + "00" * 31 + " 0",
        "3:" + "00" * 64 + "\n",
        "9" * 5000 + ":",
    ],
)
def test_malformed_frontier_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not the text of a frontier"):
        Frontier.from_text(text)


SPOTS = [(index, size) for size in range(1, LIMIT + 1) for index in range(size)]
STEPS = [(old, new) for new in range(LIMIT + 1) for old in range(new + 1)]


def test_every_inclusion_proof_verifies() -> None:
    for index, size in SPOTS:
        path = inclusion_proof(LEAVES, index, size)

        assert verify_inclusion(LEAVES[index], index, size, path, ROOTS[size]), (index, size)


def test_a_changed_inclusion_proof_fails() -> None:
    for index, size in SPOTS:
        leaf, path, root = LEAVES[index], inclusion_proof(LEAVES, index, size), ROOTS[size]
        paths = [[*path[:at], flipped(path[at], at), *path[at + 1 :]] for at in range(len(path))]
        paths += [
            [*path, leaf],
            [leaf, *path],
            path[:-1] if path else [root],
            [each[:31] for each in path] or [b""],
        ]

        assert not any(verify_inclusion(leaf, index, size, changed, root) for changed in paths), (index, size)
        assert not verify_inclusion(flipped(leaf, 31), index, size, path, root)
        assert not verify_inclusion(leaf, index, size, path, flipped(root, 0))
        for other in set(range(-2, LIMIT + 2)) - {index}:
            assert not verify_inclusion(leaf, other, size, path, root), (index, other, size)
        for other in range(-1, LIMIT + 1):
            # A path alone does not determine the size; the signed head does, and `verify_proof` compares it.
            if other <= index or len(inclusion_proof(LEAVES, index, other)) != len(path):
                assert not verify_inclusion(leaf, index, other, path, root), (index, size, other)


def test_every_consistency_proof_verifies() -> None:
    for old, new in STEPS:
        path = consistency_proof(LEAVES, old, new)

        assert verify_consistency(old, new, path, ROOTS[old], ROOTS[new]), (old, new)


def test_a_changed_consistency_proof_fails() -> None:
    for old, new in STEPS:
        path = consistency_proof(LEAVES, old, new)
        paths = [[*path[:at], flipped(path[at], at), *path[at + 1 :]] for at in range(len(path))]
        paths += [[*path, ROOTS[old]], [ROOTS[old], *path]] + ([path[:-1], path[1:]] if path else [])

        assert not any(verify_consistency(old, new, each, ROOTS[old], ROOTS[new]) for each in paths), (
            old,
            new,
        )
        assert not verify_consistency(old, new, path, flipped(ROOTS[old], 5), ROOTS[new])
        if old:  # the empty tree is a prefix of every other
            assert not verify_consistency(old, new, path, ROOTS[old], flipped(ROOTS[new], 5))
        for other in set(range(-1, LIMIT + 2)) - {old}:
            assert not verify_consistency(other, new, path, ROOTS[old], ROOTS[new]), (old, other, new)


def test_a_rewritten_log_is_not_consistent_with_the_old_one() -> None:
    for old, new in STEPS:
        for victim in range(old):
            changed = [*LEAVES[:victim], leaf_hash(b"other"), *LEAVES[victim + 1 :]]
            path = consistency_proof(changed, old, new)

            assert not verify_consistency(old, new, path, ROOTS[old], naive_root(changed[:new])), (old, new)


@given(st.lists(st.binary(max_size=3), min_size=1, max_size=200), st.data())
def test_proofs_of_larger_trees_verify(data: list[bytes], draw: st.DataObject) -> None:
    leaves = [leaf_hash(each) for each in data]
    size = draw.draw(st.integers(1, len(leaves)))
    index, old = draw.draw(st.integers(0, size - 1)), draw.draw(st.integers(0, size))
    root = naive_root(leaves[:size])

    included = verify_inclusion(leaves[index], index, size, inclusion_proof(leaves, index, size), root)
    path = consistency_proof(leaves, old, size)

    assert included
    assert verify_consistency(old, size, path, naive_root(leaves[:old]), root)


def test_consistency_chains_from_head_to_head() -> None:
    for old, new in pairwise([0, 1, 4, 5, 11, 16, LIMIT]):
        assert verify_consistency(old, new, consistency_proof(LEAVES, old, new), ROOTS[old], ROOTS[new])


@pytest.mark.parametrize(("index", "size"), [(0, 0), (-1, 3), (3, 3), (0, LIMIT + 1)])
def test_an_inclusion_proof_outside_the_tree_is_refused(index: int, size: int) -> None:
    with pytest.raises(ValueError, match="is not among"):
        inclusion_proof(LEAVES, index, size)


@pytest.mark.parametrize(("old", "new"), [(-1, 3), (4, 3), (0, LIMIT + 1)])
def test_a_consistency_proof_outside_the_tree_is_refused(old: int, new: int) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        consistency_proof(LEAVES, old, new)
