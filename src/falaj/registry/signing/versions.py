"""Sign model versions and exports, and find out whether one is still what was signed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from cryptography.hazmat.primitives.asymmetric import ec

from falaj.errors import Damaged
from falaj.governance.audit.verify import canonical
from falaj.governance.encryption.signing_keys import SigningKey
from falaj.ports.keys import KeyService
from falaj.records.record import Record
from falaj.records.registry import MANIFEST_FILE, SIGNATURE_FILE, ModelManifest
from falaj.registry.signing.bundles import SignedFiles, verify_bundle

RESERVED = frozenset({MANIFEST_FILE, SIGNATURE_FILE})
"""Names that an exported version has beside its files."""


class SignedManifest(Record):
    """A stored manifest: its canonical text, the id of the key, and the signature, which covers the files, too."""

    text: str
    key: str
    signature: str


class VersionSignatures:
    """Signs with the newest P-256 key of a platform, and verifies with every key that it has had."""

    def __init__(self, keys: KeyService) -> None:
        self._keys = keys
        self._known: dict[str, SigningKey] = {}

    def prepare(self) -> None:
        """Load what signing takes, which is slow the first time: do so before a transaction begins."""
        from falaj.registry.signing import signer as _signer  # noqa: F401

    def sign(self, manifest: ModelManifest) -> SignedManifest:
        """Sign a version: its manifest, and its files by their hashes."""
        text = canonical(manifest.model_dump(mode="json")).decode()
        signature = self.sign_files(manifest.reference, _digests(manifest, text))
        signed = self._verified(signature, manifest.reference)
        return SignedManifest(text=text, key=signed.fingerprint, signature=signature)

    def sign_files(self, name: str, digests: Mapping[str, str]) -> str:
        """Return the `model.sig` of files that have these SHA-256 digests."""
        from falaj.registry.signing.signer import sign_files

        return sign_files(name, digests, self._keys)

    def verify(self, signed: SignedManifest, *, reference: str) -> ModelManifest:
        """Return the manifest. Raise Damaged if the signature is invalid, or that of another version."""
        found = self._verified(signed.signature, reference)
        if found.digests.get(MANIFEST_FILE) != _sha256(signed.text) or found.fingerprint != signed.key:
            raise Damaged(f"the manifest of {reference} was changed after it was signed")
        manifest = ModelManifest.model_validate_json(signed.text)
        if found.digests != _digests(manifest, signed.text):
            raise Damaged(f"the signature of {reference} lists other files than its manifest")
        return manifest

    def newest_key(self) -> SigningKey:
        """Return the public key that signs now."""
        return SigningKey.from_der(self._keys.ecdsa_keys()[-1])

    def key_of(self, signed: SignedManifest) -> SigningKey:
        """Return the public key that verifies the export of a version as files."""
        found = self._find(signed.key)
        if found is None:
            raise Damaged(f"the key {signed.key} is not a key of this platform")
        return found

    def _verified(self, signature: str, reference: str) -> SignedFiles:
        return verify_bundle(signature, self._public_key, where=reference)

    def _public_key(self, fingerprint: str) -> ec.EllipticCurvePublicKey | None:
        found = self._find(fingerprint)
        return None if found is None else found.public_key

    def _find(self, fingerprint: str) -> SigningKey | None:
        """Return a key of this platform; keys are asked for again where one is not known yet, after a rotation."""
        if fingerprint not in self._known:
            keys = map(SigningKey.from_der, self._keys.ecdsa_keys())
            self._known = {key.fingerprint: key for key in keys}
        return self._known.get(fingerprint)


def _digests(manifest: ModelManifest, text: str) -> dict[str, str]:
    return {MANIFEST_FILE: _sha256(text)} | {file.path: file.sha256 for file in manifest.files}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
