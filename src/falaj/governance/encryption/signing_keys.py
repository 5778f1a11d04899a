"""The public P-256 keys of a platform, as other programs read them: PEM, named by its SHA-256."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec


class SigningKey(NamedTuple):
    """A public key, its PEM, and the fingerprint of that text, by which OpenSSF model signing names keys."""

    public_key: ec.EllipticCurvePublicKey
    pem: str
    fingerprint: str

    @classmethod
    def from_der(cls, data: bytes) -> SigningKey:
        """Return the key of a DER SubjectPublicKeyInfo. Raise ValueError unless it is one of P-256."""
        return cls._of(serialization.load_der_public_key(data))

    @classmethod
    def from_pem(cls, text: str) -> SigningKey:
        """Return the key of a PEM. Raise ValueError unless it is one of P-256."""
        return cls._of(serialization.load_pem_public_key(text.encode()))

    @classmethod
    def _of(cls, key: object) -> SigningKey:
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise ValueError("not a key of P-256")
        pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        return cls(key, pem.decode(), hashlib.sha256(pem).hexdigest())
