"""Who holds the root key: wraps data keys and signs, and never hands the root out."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class WrappedKey(NamedTuple):
    """A data key that only the root key `root` can open."""

    root: str
    ciphertext: bytes


class KeyService(Protocol):
    """A root key with versions, and an Ed25519 signing key.

    `context` is authenticated: unwrapping under another context fails. A key that is gone, locked or unreadable
    raises KeyUnavailable; a wrapped key that was altered raises Damaged.
    """

    @property
    def root(self) -> str:
        """The name of the root key version that wraps now."""
        ...

    def wrap(self, key: bytes, *, context: bytes) -> WrappedKey: ...

    def unwrap(self, wrapped: WrappedKey, *, context: bytes) -> bytes: ...

    def rotate(self) -> str:
        """Make a new root key version, which wraps from now on; earlier versions still unwrap. Its name."""
        ...

    def sign(self, message: bytes) -> bytes: ...

    def public_key(self) -> bytes:
        """The 32 raw bytes of the Ed25519 public key."""
        ...

    def close(self) -> None: ...
