"""The port for key management: wraps data keys and signs, and never exposes the root key."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class WrappedKey(NamedTuple):
    """A data key encrypted under the root key version `root`."""

    root: str
    ciphertext: bytes


class EcdsaSignature(NamedTuple):
    """A signature in DER, and the public key that verifies it as DER SubjectPublicKeyInfo."""

    signature: bytes
    public_key: bytes


class KeyService(Protocol):
    """A versioned root key, an Ed25519 signing key, and a versioned P-256 key for formats that take no Ed25519.

    `context` is additional authenticated data: a key unwraps only under the context it was wrapped with. Every method
    raises KeyUnavailable if the key is missing, locked or unreadable. `unwrap` raises Damaged if the wrapped key was
    altered or has another context.
    """

    @property
    def root(self) -> str:
        """The name of the newest root key version, under which `wrap` encrypts."""
        ...

    def wrap(self, key: bytes, *, context: bytes) -> WrappedKey:
        """Return `key` encrypted under the newest root key version."""
        ...

    def unwrap(self, wrapped: WrappedKey, *, context: bytes) -> bytes:
        """Return the data key, decrypted by the root key version that `wrapped` names."""
        ...

    def rotate(self) -> str:
        """Create a root key version for `wrap`, and return its name. Earlier versions still unwrap."""
        ...

    def sign(self, message: bytes) -> bytes:
        """Return the Ed25519 signature of `message`."""
        ...

    def public_key(self) -> bytes:
        """Return the 32 raw bytes of the Ed25519 public key."""
        ...

    def sign_ecdsa(self, message: bytes) -> EcdsaSignature:
        """Return the ECDSA signature (SHA-256) of `message` by the newest version of the P-256 key."""
        ...

    def ecdsa_keys(self) -> tuple[bytes, ...]:
        """Return the public key of every version of the P-256 key, oldest first; the last one signs."""
        ...

    def rotate_ecdsa(self) -> bytes:
        """Create a version of the P-256 key, and return its public key. Earlier ones stay in `ecdsa_keys`."""
        ...

    def keep(self, name: str, value: bytes) -> None:
        """Store a small value beside the keys, where who has the database alone cannot change it.

        A name is of letters, digits, `-` and `_`. A store that wears out may write the newest value a minute late.
        """
        ...

    def kept(self, name: str) -> bytes | None:
        """Return the newest value that was kept under `name`; none if there is none."""
        ...

    def close(self) -> None:
        """Release the keys. Later calls raise KeyUnavailable."""
        ...
