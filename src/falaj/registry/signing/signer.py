"""Make signatures with the package `model-signing` and the P-256 key of the key service.

Import this module late: the package loads the clients of Sigstore's public services, which are never called here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from cryptography.hazmat.primitives import serialization
from model_signing import manifest
from model_signing._hashing.hashing import Digest
from model_signing._signing import sign_ec_key
from model_signing._signing.signing import Payload

from falaj.ports.keys import KeyService
from falaj.registry.signing.bundles import SERIALIZATION


def sign_files(name: str, digests: Mapping[str, str], keys: KeyService) -> str:
    """Return the signature of files that have these SHA-256 digests: the text of a `model.sig`."""
    how = manifest.SerializationType.from_args(SERIALIZATION)
    items = [
        manifest.FileManifestItem(path=PurePosixPath(path), digest=Digest("sha256", bytes.fromhex(digest)))
        for path, digest in digests.items()
    ]
    signature: Any = KeyServiceSigner(keys).sign(Payload(manifest.Manifest(name, items, how)))
    return str(signature.bundle.to_json())


class KeyServiceSigner(sign_ec_key.Signer):
    """The package's signer for elliptic curves, with a key that it is not given: it may lie in a token."""

    def __init__(self, keys: KeyService) -> None:
        self._private_key: Any = _HeldKey(keys)


class _HeldKey:
    """What the package asks of a private key. The public key is that of the last signature, also after a rotation."""

    def __init__(self, keys: KeyService) -> None:
        self._keys = keys
        self._public: bytes | None = None

    def sign(self, data: bytes, _algorithm: object) -> bytes:
        signed = self._keys.sign_ecdsa(data)
        self._public = signed.public_key
        return signed.signature

    def public_key(self) -> Any:
        return serialization.load_der_public_key(self._public or self._keys.ecdsa_keys()[-1])
