"""Uploads of checkpoint parts straight to the object store, encrypted here as the platform encrypts its blobs.

The platform hands out an address and a key for each part, and checks what has arrived. Where the store cannot be
reached, or `cryptography` is not installed, parts go through the agent. Standard library only, but for that.
"""

from __future__ import annotations

import hashlib
import http.client
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from falaj.training.runtime.checkpointing.storage.store import Bytes

SMALLEST_BYTES = 1 << 20
"""Smaller parts are not worth three requests."""
LARGEST_BYTES = 4 << 30
"""A store takes 5 GiB in one request."""
CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 120.0
TAG_BYTES = 16


class StoreFailed(Exception):
    """The store did not take an upload."""


def can_seal() -> bool:
    """Return whether this Python can encrypt."""
    try:
        import cryptography.hazmat.primitives.ciphers.aead  # noqa: F401
    except ImportError:
        return False
    return True


def upload(pieces: Sequence[Bytes], grant: Mapping[str, Any]) -> str:
    """Encrypt and upload a part; return the SHA-256 of its plain bytes. StoreFailed if the store does not take it."""
    digest = hashlib.sha256()
    size = sum(memoryview(piece).nbytes for piece in pieces)
    frames = max(1, -(-size // int(grant["frame_bytes"])))
    length = len(bytes.fromhex(grant["header"])) + size + frames * TAG_BYTES
    try:
        _put(str(grant["url"]), sealed(pieces, grant, digest), length)
    except (OSError, http.client.HTTPException) as error:
        raise StoreFailed(f"{type(error).__name__}: {error}") from error
    return digest.hexdigest()


def sealed(pieces: Sequence[Bytes], grant: Mapping[str, Any], digest: Any) -> Iterator[bytes]:
    """Yield the header and the frames of a part as they lie at rest; `digest` takes the plain bytes."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    cipher = AESGCM(bytes.fromhex(grant["key"]))
    bound = bytes.fromhex(grant["bound"])
    yield bytes.fromhex(grant["header"])
    frames = _frames(pieces, int(grant["frame_bytes"]))
    frame, index = next(frames, b""), 0
    while True:
        following = next(frames, None)
        digest.update(frame)
        about = bound + struct.pack(">Q?", index, following is None)
        yield cipher.encrypt(index.to_bytes(12, "big"), frame, about)
        if following is None:
            return
        frame, index = following, index + 1


def _frames(pieces: Sequence[Bytes], size: int) -> Iterator[bytes]:
    """Yield the same bytes in frames of exactly `size`, but for the last."""
    waiting = bytearray()
    for piece in pieces:
        view = memoryview(piece).cast("B")
        while len(view):
            taken = view[: size - len(waiting)]
            waiting += taken
            view = view[len(taken) :]
            if len(waiting) == size:
                yield bytes(waiting)
                waiting.clear()
    if waiting:
        yield bytes(waiting)


def _put(url: str, body: Iterator[bytes], length: int) -> None:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(str(parts.hostname), parts.port, timeout=CONNECT_TIMEOUT_S)
    try:
        connection.connect()
        if isinstance(connection.sock, socket.socket):
            connection.sock.settimeout(ANSWER_TIMEOUT_S)
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        connection.request("PUT", target, body=body, headers={"Content-Length": str(length)})
        answer = connection.getresponse()
        answer.read()
        if answer.status != http.client.OK:
            raise StoreFailed(f"the store answered {answer.status} {answer.reason}")
    finally:
        connection.close()
