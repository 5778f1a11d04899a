"""Sign manifests, and find out whether one is still what was signed."""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from falaj.errors import Damaged
from falaj.governance.audit.verify import canonical, key_id
from falaj.ports.keys import KeyService
from falaj.records.record import Record
from falaj.records.registry import ModelManifest

DOMAIN = b"falaj model manifest v1\n"
"""Prefix that separates these signatures from all others of the key service."""


class SignedManifest(Record):
    """A stored manifest: its canonical text and its signature."""

    text: str
    key: str
    signature: str


def sign(manifest: ModelManifest, keys: KeyService) -> SignedManifest:
    data = canonical(manifest.model_dump(mode="json"))
    signature = keys.sign(DOMAIN + data).hex()
    return SignedManifest(text=data.decode(), key=key_id(keys.public_key()), signature=signature)


def verify_manifest(signed: SignedManifest, keys: KeyService, *, reference: str) -> ModelManifest:
    """Return the manifest. Raise Damaged if the signature is invalid."""
    public_key = keys.public_key()
    if signed.key != key_id(public_key):
        raise Damaged(
            f"{reference} was signed by the key {signed.key}, which is not the key of this platform"
        )
    try:
        signature = bytes.fromhex(signed.signature)
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, DOMAIN + signed.text.encode())
    except (InvalidSignature, ValueError):
        raise Damaged(f"the manifest of {reference} was changed after it was signed") from None
    return ModelManifest.model_validate_json(signed.text)
