"""The digest of bytes that are streamed through."""

from __future__ import annotations

import hashlib

import pytest

from falaj.governance.encryption.digest import RunningDigest

MIB = 1 << 20


@pytest.mark.parametrize("sizes", [[], [0], [5], [MIB] * 23, [3 * MIB + 1, 1, 9 * MIB]])
def test_the_digest_is_that_of_all_chunks_in_order(sizes: list[int]) -> None:
    chunks = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    digest = RunningDigest()

    passed = list(digest.follow(iter(chunks)))

    assert passed == chunks
    assert digest.size_bytes == sum(sizes)
    assert digest.hexdigest() == hashlib.sha256(b"".join(chunks)).hexdigest()
