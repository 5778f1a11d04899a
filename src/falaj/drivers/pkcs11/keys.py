"""Root keys that are generated in a PKCS#11 token and never leave it: the token wraps, unwraps and signs."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import pkcs11
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from pkcs11 import Attribute, KeyType, Mechanism, ObjectClass, PKCS11Error
from pkcs11.exceptions import MultipleObjectsReturned, NoSuchKey, UserAlreadyLoggedIn
from pkcs11.mechanisms import GCMParams

from falaj import errors
from falaj.ports.keys import EcdsaSignature, WrappedKey

NONCE_BYTES = 12
PUBLIC_KEY_BYTES = 32
KEEP_EVERY_S = 60
STAMP_BYTES = 8  # of the time before each kept value: the newest counts
ED25519 = bytes.fromhex("06032b6570")  # the object identifier 1.3.101.112
P256 = bytes.fromhex("06082a8648ce3d030107")  # 1.2.840.10045.3.1.7
P256_BYTES = 32
P256_POINT_BYTES = 65
STAYS_INSIDE = {Attribute.PRIVATE: True, Attribute.SENSITIVE: True, Attribute.EXTRACTABLE: False}
FOR_WRAPPING_DATA_KEYS = {
    Attribute.ENCRYPT: True,
    Attribute.DECRYPT: True,
    **dict.fromkeys((Attribute.WRAP, Attribute.UNWRAP, Attribute.SIGN, Attribute.VERIFY), False),
}

T = TypeVar("T")


class Pkcs11Keys:
    """A KeyService in a token. Root keys are labelled falaj-root-VERSION-RANDOM, so names are unique across tokens.

    One session stays open, because a login takes a hardware module 20 ms. A session runs one operation at a time, hence
    the lock. Keys are looked up at each use, so that a rotation elsewhere takes effect at once.
    """

    def __init__(self, module: str | Path, token_label: str, pin: str, *, prefix: str = "falaj") -> None:
        self._module = str(module)
        self._token_label = token_label
        self._pin = pin
        self._signing_label = f"{prefix}-signing"
        self._root_prefix = f"{prefix}-root-"
        self._root_pattern = re.compile(rf"{re.escape(self._root_prefix)}(\d+)-[0-9a-f]{{8}}")
        self._ecdsa_prefix = f"{prefix}-ecdsa-"
        self._ecdsa_pattern = re.compile(rf"{re.escape(self._ecdsa_prefix)}(\d+)-[0-9a-f]{{8}}")
        self._kept_prefix = f"{prefix}-kept-"
        self._waiting: dict[str, bytes] = {}
        self._written: dict[str, float] = {}
        self._lock = threading.Lock()
        self._session: Any = None
        self._closed = False

    @classmethod
    def open(cls, module: str | Path, token_label: str, pin: str, *, prefix: str = "falaj") -> Self:
        """Open the keys of a token."""
        keys = cls(module, token_label, pin, prefix=prefix)
        keys._use(keys._newest_root)
        keys.public_key()
        return keys

    @classmethod
    def open_or_create(cls, module: str | Path, token_label: str, pin: str, *, prefix: str = "falaj") -> Self:
        """Open the keys of a token, and generate missing ones. Not safe for concurrent processes."""
        keys = cls(module, token_label, pin, prefix=prefix)
        keys._use(keys._make_missing)
        return keys

    @property
    def root(self) -> str:
        return self._use(lambda session: str(self._newest_root(session).label))

    def wrap(self, key: bytes, *, context: bytes) -> WrappedKey:
        def wrapped(session: Any) -> WrappedKey:
            root = self._newest_root(session)
            nonce = os.urandom(NONCE_BYTES)
            return WrappedKey(root.label, nonce + encrypt(root, nonce, key, context))

        return self._use(wrapped)

    def unwrap(self, wrapped: WrappedKey, *, context: bytes) -> bytes:
        nonce, sealed = wrapped.ciphertext[:NONCE_BYTES], wrapped.ciphertext[NONCE_BYTES:]

        def unwrapped(session: Any) -> bytes:
            root = self._root(session, wrapped.root)
            try:
                return decrypt(root, nonce, sealed, context)
            except PKCS11Error:
                # Tokens report an invalid tag differently, SoftHSM2 by its general error. If a probe decrypts,
                # the ciphertext is at fault; otherwise the probe raises the error of the token.
                probe = os.urandom(NONCE_BYTES)
                decrypt(root, probe, encrypt(root, probe, b"probe", context), context)
                raise errors.Damaged(
                    f"a key wrapped by {wrapped.root} was altered, or belongs elsewhere"
                ) from None

        return self._use(unwrapped)

    def rotate(self) -> str:
        def rotated(session: Any) -> str:
            return self._make_root(session, self._version(self._newest_root(session)) + 1)

        return self._use(rotated)

    def sign(self, message: bytes) -> bytes:
        def signed(session: Any) -> bytes:
            key = self._signing_key(session, ObjectClass.PRIVATE_KEY)
            return bytes(key.sign(message, mechanism=Mechanism.EDDSA))

        return self._use(signed)

    def public_key(self) -> bytes:
        def point(session: Any) -> bytes:
            return bytes(self._signing_key(session, ObjectClass.PUBLIC_KEY)[Attribute.EC_POINT])

        return self._use(point)[-PUBLIC_KEY_BYTES:]  # some tokens wrap the point in DER, some do not

    def sign_ecdsa(self, message: bytes) -> EcdsaSignature:
        digest = hashlib.sha256(message).digest()  # not every token hashes for ECDSA by itself

        def signed(session: Any) -> EcdsaSignature:
            public = self._newest_ecdsa(session)
            key = self._key(session, ObjectClass.PRIVATE_KEY, KeyType.EC, public.label)
            raw = bytes(key.sign(digest, mechanism=Mechanism.ECDSA))
            r, s = (int.from_bytes(half, "big") for half in (raw[:P256_BYTES], raw[P256_BYTES:]))
            return EcdsaSignature(encode_dss_signature(r, s), spki(public))

        return self._use(signed)

    def ecdsa_keys(self) -> tuple[bytes, ...]:
        def found(session: Any) -> tuple[bytes, ...]:
            self._newest_ecdsa(session)
            return tuple(spki(key) for key in self._ecdsa_public(session))

        return self._use(found)

    def rotate_ecdsa(self) -> bytes:
        def rotated(session: Any) -> bytes:
            return spki(self._make_ecdsa(session, self._ecdsa_version(self._newest_ecdsa(session)) + 1))

        return self._use(rotated)

    def keep(self, name: str, value: bytes) -> None:
        """Write at most once a minute: the memory of a token wears out. `close` writes what is left."""
        self._waiting[name] = value
        if time.monotonic() - self._written.get(name, -KEEP_EVERY_S) >= KEEP_EVERY_S:
            self._use(lambda session: self._write_kept(session, name))

    def kept(self, name: str) -> bytes | None:
        if name in self._waiting:
            return self._waiting[name]
        found = self._use(
            lambda session: [bytes(each[Attribute.VALUE]) for each in self._kept(session, name)]
        )
        return max(found)[STAMP_BYTES:] if found else None

    def _kept(self, session: Any, name: str) -> list[Any]:
        about = {Attribute.CLASS: ObjectClass.DATA, Attribute.LABEL: f"{self._kept_prefix}{name}"}
        return list(session.get_objects(about))

    def _write_kept(self, session: Any, name: str) -> None:
        """Write the new value before the old ones go: one of them is always there."""
        old, stamp = self._kept(session, name), time.time_ns().to_bytes(STAMP_BYTES, "big")
        session.create_object(
            {
                Attribute.CLASS: ObjectClass.DATA,
                Attribute.TOKEN: True,
                Attribute.PRIVATE: True,
                Attribute.LABEL: f"{self._kept_prefix}{name}",
                Attribute.VALUE: stamp + self._waiting[name],
            }
        )
        for each in old:
            each.destroy()
        self._written[name] = time.monotonic()
        del self._waiting[name]

    def close(self) -> None:
        for name in list(self._waiting):
            with suppress(errors.KeyUnavailable):
                self._use(lambda session, name=name: self._write_kept(session, name))  # type: ignore[misc]
        with self._lock:
            self._closed = True
            self._drop_session()

    def __repr__(self) -> str:
        return f"Pkcs11Keys({self._module!r}, {self._token_label!r})"

    def _use(self, action: Callable[[Any], T]) -> T:
        """Run `action` on the session; if it fails, retry once on a new session."""
        with self._lock:
            try:
                return action(self._opened())
            except PKCS11Error:
                self._drop_session()
            try:
                return action(self._opened())
            except PKCS11Error as fault:
                self._drop_session()
                raise self._unavailable(fault) from fault

    def _opened(self) -> Any:
        if self._closed:
            raise errors.KeyUnavailable(f"the token {self._token_label!r} was closed")
        if self._session is None:
            try:  # no retry here: each wrong PIN brings the token closer to its lock-out
                token = pkcs11.lib(self._module).get_token(token_label=self._token_label)
                self._session = open_session(token, self._pin)
            except PKCS11Error as fault:
                raise self._unavailable(fault) from None
        return self._session

    def _drop_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            with suppress(PKCS11Error):
                session.close()

    def _unavailable(self, fault: PKCS11Error) -> errors.KeyUnavailable:
        said = f"{type(fault).__name__} {fault}".strip()
        return errors.KeyUnavailable(f"the token {self._token_label!r} is unavailable: {said}")

    def _roots(self, session: Any) -> list[Any]:
        keys = list(
            session.get_objects({Attribute.CLASS: ObjectClass.SECRET_KEY, Attribute.KEY_TYPE: KeyType.AES})
        )
        return [key for key in keys if self._root_pattern.fullmatch(key.label)]

    def _root(self, session: Any, name: str) -> Any:
        if not self._root_pattern.fullmatch(name):
            raise errors.KeyUnavailable(f"root key {name} is not in the token {self._token_label!r}")
        return self._key(session, ObjectClass.SECRET_KEY, KeyType.AES, name)

    def _newest_root(self, session: Any) -> Any:
        roots = self._roots(session)
        if not roots:
            raise NoSuchKey(f"{self._root_prefix}…")
        return max(roots, key=lambda key: (self._version(key), key.label))

    def _version(self, root: Any) -> int:
        return int(root.label.removeprefix(self._root_prefix).partition("-")[0])

    def _ecdsa_public(self, session: Any) -> list[Any]:
        """Return the public keys of every version of the P-256 key, oldest first."""
        about = {Attribute.CLASS: ObjectClass.PUBLIC_KEY, Attribute.KEY_TYPE: KeyType.EC}
        keys = [key for key in session.get_objects(about) if self._ecdsa_pattern.fullmatch(key.label)]
        return sorted(keys, key=lambda key: (self._ecdsa_version(key), key.label))

    def _newest_ecdsa(self, session: Any) -> Any:
        """Return the public key of the version that signs; create the first one in a token that has none."""
        keys = self._ecdsa_public(session)
        return keys[-1] if keys else self._make_ecdsa(session, 1)

    def _ecdsa_version(self, key: Any) -> int:
        return int(key.label.removeprefix(self._ecdsa_prefix).partition("-")[0])

    def _make_ecdsa(self, session: Any, version: int) -> Any:
        curve = session.create_domain_parameters(KeyType.EC, {Attribute.EC_PARAMS: P256}, local=True)
        label = f"{self._ecdsa_prefix}{version}-{secrets.token_hex(4)}"
        public, _ = curve.generate_keypair(
            mechanism=Mechanism.EC_KEY_PAIR_GEN, label=label, store=True, private_template=STAYS_INSIDE
        )
        return public

    def _signing_key(self, session: Any, kind: ObjectClass) -> Any:
        return self._key(session, kind, KeyType.EC_EDWARDS, self._signing_label)

    def _key(self, session: Any, kind: ObjectClass, key_type: KeyType, label: str) -> Any:
        """Return the key with a label. NoSuchKey may also mean that the session was logged out."""
        try:
            return session.get_key(kind, key_type, label)
        except (NoSuchKey, MultipleObjectsReturned) as fault:
            raise type(fault)(label) from None

    def _make_missing(self, session: Any) -> None:
        if not self._roots(session):
            self._make_root(session, 1)
        about_signing = {Attribute.CLASS: ObjectClass.PRIVATE_KEY, Attribute.LABEL: self._signing_label}
        if not list(session.get_objects(about_signing)):
            curve = session.create_domain_parameters(
                KeyType.EC_EDWARDS, {Attribute.EC_PARAMS: ED25519}, local=True
            )
            curve.generate_keypair(
                mechanism=Mechanism.EC_EDWARDS_KEY_PAIR_GEN,
                label=self._signing_label,
                store=True,
                private_template=STAYS_INSIDE,
            )
        self._newest_ecdsa(session)

    def _make_root(self, session: Any, version: int) -> str:
        name = f"{self._root_prefix}{version}-{secrets.token_hex(4)}"
        template = {**STAYS_INSIDE, **FOR_WRAPPING_DATA_KEYS}
        session.generate_key(KeyType.AES, 256, label=name, store=True, template=template)
        return name


def spki(key: Any) -> bytes:
    """Return a public key of P-256 as DER SubjectPublicKeyInfo."""
    point = bytes(key[Attribute.EC_POINT])[-P256_POINT_BYTES:]  # some tokens wrap the point in DER
    public = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), point)
    return public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def open_session(token: Any, pin: str) -> Any:
    """Return a session that may use private keys. A login holds for all sessions of a process."""
    try:
        return token.open(rw=True, user_pin=pin)
    except UserAlreadyLoggedIn:
        return token.open(rw=True)


def encrypt(root: Any, nonce: bytes, plain: bytes, context: bytes) -> bytes:
    params = GCMParams(nonce, context)
    return bytes(root.encrypt(plain, mechanism=Mechanism.AES_GCM, mechanism_param=params))


def decrypt(root: Any, nonce: bytes, sealed: bytes, context: bytes) -> bytes:
    params = GCMParams(nonce, context)
    return bytes(root.decrypt(sealed, mechanism=Mechanism.AES_GCM, mechanism_param=params))
