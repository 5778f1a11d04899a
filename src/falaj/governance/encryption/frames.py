"""A blob as it lies at rest: a header, then AES-256-GCM frames that cannot be changed, moved, cut or mixed unnoticed.

    header   magic, format, data-key version, 32 random bytes of salt, CRC-32 of the foregoing
    frame    up to 1,048,560 encrypted bytes and a 16-byte tag: 1 MiB as stored, so that frames fall on the
             boundaries of the chunks that a store hands out, and are decrypted where they lie

The subkey is HKDF-SHA256(data key, salt, workspace and blob), new with every write, so the frame's index can be its
nonce. Each tag covers the header, workspace, blob, index, and whether the frame is the last. The CRC is not for
safety: it tells a rotten header (Damaged) from a destroyed data key (KeyUnavailable).
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import count, cycle
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from falaj import errors

FRAME_BYTES = 1 << 20
TAG_BYTES = 16
PLAIN_BYTES = FRAME_BYTES - TAG_BYTES
KEY_BYTES = 32

MAGIC = b"FALAJB"
FORMAT = 1
FIELDS = struct.Struct(">6sHI32s")
CHECKSUM = struct.Struct(">I")
HEADER_BYTES = FIELDS.size + CHECKSUM.size

Piece = bytes | bytearray | memoryview
ReadRange = Callable[[int, int], Iterator[bytes]]


class DataKey(NamedTuple):
    """The key of a workspace, and which of its versions this is."""

    version: int
    secret: bytes

    def __repr__(self) -> str:
        return f"DataKey(version={self.version})"


class SealingKey(NamedTuple):
    """All that is needed to encrypt one blob, elsewhere too: its header, what its tags cover, and its subkey."""

    header: bytes
    bound: bytes
    subkey: bytes

    def __repr__(self) -> str:
        return "SealingKey()"


def sealing_key(*, key: DataKey, workspace: str, blob: str) -> SealingKey:
    """Return a new key for one blob; it opens no other."""
    header = new_header(key)
    cipher = FrameCipher(header, secret=key.secret, workspace=workspace, blob=blob)
    return SealingKey(header, cipher.bound, cipher.subkey)


def new_header(key: DataKey) -> bytes:
    fields = FIELDS.pack(MAGIC, FORMAT, key.version, os.urandom(32))
    return fields + CHECKSUM.pack(zlib.crc32(fields))


def encrypt(chunks: Iterable[Piece], *, key: DataKey, workspace: str, blob: str) -> Iterator[bytes]:
    """The stored form of `chunks`: the header, then one frame at a time."""
    header = new_header(key)
    cipher = FrameCipher(header, secret=key.secret, workspace=workspace, blob=blob)
    yield header

    pieces = regroup(chunks, PLAIN_BYTES)
    piece = next(pieces, b"")
    for index in count():
        following = next(pieces, None)
        yield cipher.seal(index, piece, last=following is None)
        if following is None:
            return
        piece = following


def decrypt(
    read_range: ReadRange,
    *,
    stored_size: int,
    keys: Callable[[int], bytes],
    workspace: str,
    blob: str,
    start: int = 0,
    length: int | None = None,
) -> Iterator[bytes]:
    """The plain bytes from `start`, at most `length` of them; only the frames that hold them are read.

    `read_range(offset, size)` gives stored bytes, `keys(version)` the data key. Each chunk is authentic when it is
    handed out; that none is missing is known when the iterator ends. A range that touches the end of the blob always
    opens the last frame, so that a blob cut short is noticed.
    """
    span = Span.of(stored_size, start=start, length=length, blob=blob)
    if length == 0:
        return iter(())
    if span.last == 0:  # one frame: take the header along, which saves a round trip
        content = b"".join(read_range(0, min(span.offset(1), stored_size)))
        header, sealed = content[:HEADER_BYTES], iter([content[HEADER_BYTES:]])
    else:
        header = b"".join(read_range(0, HEADER_BYTES))
        begin = span.offset(span.first)
        sealed = read_range(begin, min(span.offset(span.last + 1), stored_size) - begin)
    cipher = FrameCipher(header, secret=keys(key_version(header, blob)), workspace=workspace, blob=blob)
    return opened(cipher, sealed, span)


def stored_size(plain: int) -> int:
    """Return the stored size of a blob of `plain` bytes."""
    frames = max(1, -(-plain // PLAIN_BYTES))
    return HEADER_BYTES + plain + frames * TAG_BYTES


def plain_size(stored: int, *, blob: str = "") -> int:
    """Return the plain size of a blob with `stored` bytes at rest. Only reading proves that it is intact."""
    frames = max(1, frame_count(stored))
    tail = stored - HEADER_BYTES - (frames - 1) * FRAME_BYTES
    if tail < TAG_BYTES or (tail == TAG_BYTES and frames > 1):
        raise damaged(blob, frames - 1, f"is cut short ({stored} bytes are stored)")
    return stored - HEADER_BYTES - frames * TAG_BYTES


def frame_count(stored: int) -> int:
    return -(-(stored - HEADER_BYTES) // FRAME_BYTES)


class Span(NamedTuple):
    """The plain bytes `start` to `end`, and the frames to open for them, `first` to `last`, of all `frames`."""

    start: int
    end: int
    first: int
    last: int
    frames: int

    @classmethod
    def of(cls, stored: int, *, start: int, length: int | None, blob: str) -> Span:
        if start < 0 or (length is not None and length < 0):
            raise errors.InvalidInput.at(
                "range", given=(start, length), allowed="start and length from 0 upwards"
            )
        size, frames = plain_size(stored, blob=blob), frame_count(stored)
        end = size if length is None else min(size, start + length)
        last = frames - 1 if end == size else max(0, end - 1) // PLAIN_BYTES
        return cls(start, end, min(start // PLAIN_BYTES, last), last, frames)

    @staticmethod
    def offset(frame: int) -> int:
        return HEADER_BYTES + frame * FRAME_BYTES


def key_version(header: bytes, blob: str) -> int:
    """Which version of the data key `header` names, once it is known to be whole."""
    fields, checksum = header[: FIELDS.size], header[FIELDS.size :]
    if checksum != CHECKSUM.pack(zlib.crc32(fields)):
        raise damaged(blob, 0, "has a header that was altered")
    magic, form, version, _ = FIELDS.unpack(fields)
    if (magic, form) != (MAGIC, FORMAT):
        raise damaged(blob, 0, f"has a header of format {form}; this release reads {FORMAT}")
    return int(version)


def opened(cipher: FrameCipher, sealed: Iterator[bytes], span: Span) -> Iterator[bytes]:
    index = span.first
    for frame in regroup(sealed, FRAME_BYTES):
        if index > span.last:
            raise cipher.damaged(index, "should not be there")
        plain = cipher.open(index, frame, last=index == span.frames - 1)
        begin = index * PLAIN_BYTES
        wanted = plain[max(0, span.start - begin) : max(0, span.end - begin)]  # whole frames are not copied
        if wanted:
            yield wanted
        index += 1
    if index <= span.last:
        raise cipher.damaged(index, "is missing")


class FrameCipher:
    """Seals and opens the frames of one blob."""

    def __init__(self, header: bytes, *, secret: bytes, workspace: str, blob: str) -> None:
        if len(secret) != KEY_BYTES:
            raise errors.KeyUnavailable(f"the data key of blob {blob!r} is not {KEY_BYTES} bytes long")
        place = b"".join(len(part).to_bytes(4, "big") + part for part in (workspace.encode(), blob.encode()))
        salt = header[FIELDS.size - 32 : FIELDS.size]
        derivation = HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=salt, info=b"falaj blob" + place)
        self.subkey = derivation.derive(secret)
        self._aes = AESGCM(self.subkey)
        self.bound = header + place
        self._blob = blob

    def seal(self, index: int, plain: Piece, *, last: bool) -> bytes:
        return self._aes.encrypt(nonce(index), plain, self._about(index, last))

    def open(self, index: int, sealed: Piece, *, last: bool) -> bytes:
        try:
            return self._aes.decrypt(nonce(index), sealed, self._about(index, last))
        except InvalidTag:
            raise self.damaged(index, "does not authenticate") from None

    def damaged(self, index: int, why: str) -> errors.Damaged:
        return damaged(self._blob, index, why)

    def _about(self, index: int, last: bool) -> bytes:
        return self.bound + struct.pack(">Q?", index, last)


def nonce(index: int) -> bytes:
    return index.to_bytes(12, "big")


def damaged(blob: str, frame: int, why: str) -> errors.Damaged:
    name = f"blob {blob!r}" if blob else "the blob"
    return errors.Damaged(f"{name} is damaged: frame {frame} {why}", details={"blob": blob, "frame": frame})


def regroup(chunks: Iterable[Piece], size: int) -> Iterator[Piece]:
    """The same bytes in pieces of exactly `size`, but for the last; what lies in one chunk is not copied.

    A piece is good until two more were taken: the others are put together in two buffers by turns, since a new buffer
    each time costs more than encryption does (the allocator gives the memory back and asks for it again).
    """
    buffers = cycle((bytearray(), bytearray()))
    buffer, filled = next(buffers), 0
    for chunk in chunks:
        rest = memoryview(chunk)
        while len(rest):
            if not filled and len(rest) >= size:
                yield rest[:size]
                rest = rest[size:]
                continue
            if not buffer:
                buffer.extend(bytes(size))
            taken = min(size - filled, len(rest))
            buffer[filled : filled + taken] = rest[:taken]
            filled, rest = filled + taken, rest[taken:]
            if filled == size:
                yield buffer
                buffer, filled = next(buffers), 0
    if filled:
        yield memoryview(buffer)[:filled]
