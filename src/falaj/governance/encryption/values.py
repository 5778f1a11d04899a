"""Encryption of small values one by one, for tables and stores."""

from __future__ import annotations

import os
import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from falaj.errors import Damaged
from falaj.governance.encryption.blobs import DataKeys

_VERSION = struct.Struct(">I")
NONCE_BYTES = 12
HEADER_BYTES = _VERSION.size + NONCE_BYTES


class SealedValues:
    """Values of a workspace under a subkey of its data key. `context` is authenticated: a value cannot be moved."""

    def __init__(self, keys: DataKeys, purpose: str) -> None:
        self._keys = keys
        self._purpose = purpose.encode()
        self._ciphers: dict[bytes, AESGCM] = {}

    def seal(self, workspace: str, value: bytes, *, context: bytes) -> bytes:
        key = self._keys.current(workspace)
        nonce = os.urandom(NONCE_BYTES)
        sealed = self._cipher(key.secret).encrypt(nonce, value, context)
        return _VERSION.pack(key.version) + nonce + sealed

    def unseal(self, workspace: str, sealed: bytes, *, context: bytes) -> bytes:
        """Damaged if it is not what was sealed there; KeyUnavailable if its key was destroyed."""
        if len(sealed) < HEADER_BYTES:
            raise Damaged("a sealed value is cut off")
        (version,) = _VERSION.unpack_from(sealed)
        cipher = self._cipher(self._keys.version(workspace, version))
        try:
            return cipher.decrypt(sealed[_VERSION.size : HEADER_BYTES], sealed[HEADER_BYTES:], context)
        except InvalidTag:
            raise Damaged("a sealed value was altered or moved") from None

    def _cipher(self, secret: bytes) -> AESGCM:
        cipher = self._ciphers.get(secret)
        if cipher is None:
            subkey = HKDF(SHA256(), 32, None, b"falaj values/" + self._purpose).derive(secret)
            cipher = self._ciphers[secret] = AESGCM(subkey)
        return cipher
