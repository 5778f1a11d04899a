"""Encrypted frames return what was written, or raise Damaged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from falaj.errors import Damaged, InvalidInput, KeyUnavailable
from falaj.governance.encryption import frames
from falaj.governance.encryption.frames import FRAME_BYTES, HEADER_BYTES, PLAIN_BYTES, TAG_BYTES, DataKey

KEY = DataKey(7, bytes(range(32)))
PATTERN = bytes(range(251)) * (3 * PLAIN_BYTES // 251 + 1)  # 251 is prime: no two frames are alike
SIZES = st.one_of(
    st.integers(0, 300),
    st.sampled_from([PLAIN_BYTES, 2 * PLAIN_BYTES]).flatmap(lambda edge: st.integers(edge - 2, edge + 2)),
)


@dataclass
class Stored:
    """Stored bytes, and the ranges of them that were read."""

    content: bytes
    reads: list[tuple[int, int]] = field(default_factory=list)

    def read_range(self, offset: int, size: int) -> Iterator[bytes]:
        self.reads.append((offset, size))
        for start in range(offset, min(offset + size, len(self.content)), 700_001):
            yield self.content[start : min(start + 700_001, offset + size)]


def seal(plain: bytes, *, workspace: str = "w", blob: str = "b", chunk: int = 1 << 20) -> bytes:
    chunks = (plain[start : start + chunk] for start in range(0, len(plain), chunk))
    return b"".join(frames.encrypt(chunks, key=KEY, workspace=workspace, blob=blob))


def unseal(content: bytes, *, start: int = 0, length: int | None = None) -> bytes:
    return b"".join(opened(Stored(content), start=start, length=length))


def opened(stored: Stored, *, start: int = 0, length: int | None = None) -> Iterator[bytes]:
    return frames.decrypt(
        stored.read_range,
        stored_size=len(stored.content),
        keys={KEY.version: KEY.secret}.__getitem__,
        workspace="w",
        blob="b",
        start=start,
        length=length,
    )


def parts(content: bytes) -> list[bytes]:
    """Return the header and the frames."""
    body = range(HEADER_BYTES, len(content), FRAME_BYTES)
    return [content[:HEADER_BYTES], *(content[start : start + FRAME_BYTES] for start in body)]


THREE = PATTERN[: 2 * PLAIN_BYTES + 100]
SEALED = seal(THREE)


@given(size=SIZES, chunk=st.integers(1, 2 * PLAIN_BYTES))
@settings(max_examples=40)
def test_sealed_bytes_are_unsealed(size: int, chunk: int) -> None:
    plain = PATTERN[:size]

    content = seal(plain, chunk=max(chunk, size // 200 + 1))

    assert unseal(content) == plain
    assert len(content) == frames.stored_size(size)
    assert frames.plain_size(len(content)) == size


@given(start=st.integers(0, len(THREE) + 10), length=st.none() | st.integers(0, len(THREE) + 10))
@settings(max_examples=60)
@example(start=PLAIN_BYTES, length=PLAIN_BYTES)
@example(start=PLAIN_BYTES - 1, length=2)
@example(start=len(THREE), length=None)
def test_a_range_is_a_slice(start: int, length: int | None) -> None:
    end = None if length is None else start + length

    assert unseal(SEALED, start=start, length=length) == THREE[start:end]


def test_a_range_reads_only_the_frames_that_hold_it() -> None:
    stored = Stored(SEALED)

    b"".join(opened(stored, start=PLAIN_BYTES + 5, length=10))

    assert stored.reads == [(0, HEADER_BYTES), (HEADER_BYTES + FRAME_BYTES, FRAME_BYTES)]


def test_an_empty_blob_is_one_empty_frame() -> None:
    content = seal(b"")

    assert len(content) == HEADER_BYTES + TAG_BYTES
    assert unseal(content) == b""


def test_the_same_bytes_are_stored_differently_each_time() -> None:
    assert seal(b"same") != seal(b"same")


@given(bit=st.integers(0, 8 * len(SEALED) - 1))
@settings(max_examples=60)
def test_a_flipped_bit_is_noticed(bit: int) -> None:
    content = bytearray(SEALED)

    content[bit // 8] ^= 1 << bit % 8

    frame = max(0, bit // 8 - HEADER_BYTES) // FRAME_BYTES
    with pytest.raises(Damaged, match=f"frame {frame}"):
        unseal(bytes(content))


def test_every_bit_of_a_small_blob_counts() -> None:
    small = seal(b"x" * 24)

    for bit in range(8 * len(small)):
        content = bytearray(small)
        content[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged, match="frame 0"):
            unseal(bytes(content))


@given(kept=st.integers(0, len(SEALED) - 1))
@settings(max_examples=60)
@example(kept=0)
@example(kept=HEADER_BYTES)
@example(kept=HEADER_BYTES + FRAME_BYTES)
@example(kept=HEADER_BYTES + 2 * FRAME_BYTES)
@example(kept=HEADER_BYTES + 2 * FRAME_BYTES + TAG_BYTES)
def test_truncation_is_noticed(kept: int) -> None:
    with pytest.raises(Damaged, match="frame"):
        unseal(SEALED[:kept])


@pytest.mark.parametrize("start", [0, PLAIN_BYTES - 1, PLAIN_BYTES, len(THREE)])
def test_truncation_is_noticed_by_a_read_from_any_offset_to_the_end(start: int) -> None:
    with pytest.raises(Damaged, match="frame 0 does not authenticate"):
        unseal(SEALED[: HEADER_BYTES + FRAME_BYTES], start=start)


@pytest.mark.parametrize("missing", [1, FRAME_BYTES])
def test_bytes_that_vanish_during_a_read_are_noticed(missing: int) -> None:
    stored = Stored(SEALED)
    reading = opened(stored)

    stored.content = SEALED[:-missing]

    with pytest.raises(Damaged, match=r"frame \d"):
        b"".join(reading)


@given(order=st.permutations([1, 2, 3]).filter(lambda order: order != [1, 2, 3]))
def test_reordered_frames_are_noticed(order: list[int]) -> None:
    held = parts(SEALED)

    with pytest.raises(Damaged, match="frame"):
        unseal(b"".join([held[0], *(held[index] for index in order)]))


@pytest.mark.parametrize("order", [[1, 1, 2, 3], [1, 2, 2, 3], [1, 2, 3, 3], [1, 3], [2, 3], [1, 1, 3]])
def test_repeated_and_dropped_frames_are_noticed(order: list[int]) -> None:
    held = parts(SEALED)

    with pytest.raises(Damaged, match="frame"):
        unseal(b"".join([held[0], *(held[index] for index in order)]))


@given(more=st.binary(min_size=1, max_size=100))
def test_appended_bytes_are_noticed(more: bytes) -> None:
    with pytest.raises(Damaged, match="frame 2"):
        unseal(SEALED + more)


def test_an_appended_frame_is_noticed() -> None:
    whole = seal(PATTERN[:PLAIN_BYTES])

    with pytest.raises(Damaged, match="frame 0"):
        unseal(whole + parts(SEALED)[1])


def test_a_frame_of_another_write_of_the_same_blob_is_noticed() -> None:
    ours, theirs = parts(SEALED), parts(seal(THREE))

    with pytest.raises(Damaged, match="frame 1"):
        unseal(b"".join([ours[0], ours[1], theirs[2], ours[3]]))


@pytest.mark.parametrize("place", [("w", "other"), ("other", "b"), ("wb", ""), ("", "wb")])
def test_bytes_of_another_place_are_noticed(place: tuple[str, str]) -> None:
    workspace, blob = place

    with pytest.raises(Damaged, match="frame 0"):
        unseal(seal(b"secret", workspace=workspace, blob=blob))


def test_a_destroyed_key_is_reported_as_such() -> None:
    def destroyed(version: int) -> bytes:
        raise KeyUnavailable(f"version {version} was destroyed")

    stored = Stored(SEALED)

    with pytest.raises(KeyUnavailable, match="version 7"):
        frames.decrypt(
            stored.read_range, stored_size=len(SEALED), keys=destroyed, workspace="w", blob="b", start=1
        )


def test_a_range_before_the_beginning_is_refused() -> None:
    with pytest.raises(InvalidInput, match="range"):
        unseal(SEALED, start=-1)


def test_repr_of_a_data_key_hides_it() -> None:
    assert repr(KEY) == "DataKey(version=7)"
