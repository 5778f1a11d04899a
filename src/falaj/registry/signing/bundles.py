"""Verify signatures in the format of OpenSSF model signing: a sigstore bundle around an in-toto statement.

The package `model-signing` verifies them, too, and takes a third of a second and 45 MB to import. Here is what the
signatures of a platform need: one P-256 key, digests of files by SHA-256, and nothing beside what is signed.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from falaj.errors import Damaged
from falaj.records.registry import SIGNATURE_FILE
from falaj.registry.file_formats.strict_json import parse_json

BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"
SERIALIZATION = {
    "method": "files",
    "hash_type": "sha256",
    "allow_symlinks": False,
    "ignore_paths": [SIGNATURE_FILE],
}
"""How the files were hashed: each as a whole, without links, and all but the signature itself."""
DIGEST = re.compile(r"[0-9a-f]{64}")

FindKey = Callable[[str], ec.EllipticCurvePublicKey | None]
"""Returns the trusted public key that has a fingerprint."""


class SignedFiles(NamedTuple):
    """What a signature covers: the name of the model, and the SHA-256 of each file by its path."""

    name: str
    digests: dict[str, str]
    fingerprint: str
    """The SHA-256 of the public key as PEM."""


def verify_bundle(text: str, find_key: FindKey, *, where: str) -> SignedFiles:
    """Return what the bundle signs. Raise Damaged unless a trusted key signed it, and there is nothing else in it."""
    try:
        bundle = parse_json(text.encode())
        envelope = bundle["dsseEnvelope"]
        fingerprint = str(bundle["verificationMaterial"]["publicKey"]["hint"])
        payload, signature = _decoded(envelope["payload"]), _decoded(envelope["signatures"][0]["sig"])
        if bundle != _bundle(payload, signature, fingerprint):
            raise ValueError("unknown fields")
        key = find_key(fingerprint)
        if key is None:
            raise Damaged(
                f"{where} was signed by the key {fingerprint}, which is not a key of this platform",
            )
        key.verify(signature, _pre_authentication(payload), ec.ECDSA(hashes.SHA256()))
        return _statement(parse_json(payload), fingerprint)
    except (InvalidSignature, ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise Damaged(f"the signature of {where} is invalid, or of something else") from None


def _decoded(text: Any) -> bytes:
    return base64.b64decode(text, validate=True)


def _bundle(payload: bytes, signature: bytes, fingerprint: str) -> dict[str, Any]:
    """Return the one bundle that has these parts."""
    encoded = base64.b64encode(payload).decode(), base64.b64encode(signature).decode()
    return {
        "mediaType": BUNDLE_TYPE,
        "verificationMaterial": {"publicKey": {"hint": fingerprint}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": encoded[0],
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": encoded[1], "keyid": ""}],
        },
    }


def _pre_authentication(payload: bytes) -> bytes:
    """Return the bytes that a DSSE envelope signs: its type and its payload, each with its length."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def _statement(statement: Any, fingerprint: str) -> SignedFiles:
    """Return the files of an in-toto statement. Raise ValueError for any other than this platform makes."""
    predicate, (subject,) = statement["predicate"], statement["subject"]
    if (statement["_type"], statement["predicateType"]) != (STATEMENT_TYPE, PREDICATE_TYPE):
        raise ValueError("a statement of another type")
    if predicate["serialization"] != SERIALIZATION:
        raise ValueError("files that were hashed in another way")
    digests: dict[str, str] = {}
    root = hashlib.sha256()
    for resource in predicate["resources"]:
        name, digest = resource["name"], resource["digest"]
        if resource["algorithm"] != "sha256" or not DIGEST.fullmatch(digest) or name in digests:
            raise ValueError("a file twice, or with another hash")
        digests[name] = digest
        root.update(bytes.fromhex(digest))
    if subject["digest"] != {"sha256": root.hexdigest()}:
        raise ValueError("a digest of other files")
    return SignedFiles(str(subject["name"]), digests, fingerprint)
