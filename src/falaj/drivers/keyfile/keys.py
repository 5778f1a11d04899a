"""Root keys in one JSON file of mode 0600: for one machine, where the disk is trusted as far as its owner is."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from falaj import errors
from falaj.ports.keys import EcdsaSignature, WrappedKey

FORMAT = 1
P256 = ec.SECP256R1()
P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
ECDSA_INFO = b"falaj P-256 signing key"
KEY_BYTES = 32
NONCE_BYTES = 12
ABOUT = "Who has this file can read all that this Falaj stores; without it nobody can. Keep a copy offline."


class KeyFile:
    """A KeyService whose root keys are in a file. Changes by other processes take effect at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._closed = False
        self._secrets, self._seen = read_key_file(path)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing key file."""
        return cls(path)

    @classmethod
    def create(cls, path: Path) -> Self:
        """Create a key file. Raise AlreadyExists if it exists, also if another process creates it concurrently."""
        fresh = KeyMaterial(f"file-{secrets.token_hex(6)}", {1: new_key()}, signing=new_key())
        with translate_os_errors(path, "made"):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with directory_lock(path.parent):
                try:
                    write_key_file(fresh, path, os.link)  # unlike a rename, a link never replaces a file
                except FileExistsError:
                    raise errors.AlreadyExists(f"the key file {path} exists") from None
        return cls(path)

    @classmethod
    def open_or_create(cls, path: Path) -> Self:
        """Open the key file, or create it if it does not exist."""
        if not path.exists():
            try:
                return cls.create(path)
            except errors.AlreadyExists:
                pass
        return cls.open(path)

    @property
    def root(self) -> str:
        return self._now().newest

    def wrap(self, key: bytes, *, context: bytes) -> WrappedKey:
        held = self._now()
        nonce = os.urandom(NONCE_BYTES)
        return WrappedKey(held.newest, nonce + AESGCM(held.root(held.newest)).encrypt(nonce, key, context))

    def unwrap(self, wrapped: WrappedKey, *, context: bytes) -> bytes:
        root = self._now().root(wrapped.root)
        nonce, sealed = wrapped.ciphertext[:NONCE_BYTES], wrapped.ciphertext[NONCE_BYTES:]
        try:
            return AESGCM(root).decrypt(nonce, sealed, context)
        except (InvalidTag, ValueError):  # ValueError: shorter than a nonce
            raise errors.Damaged(
                f"a key wrapped by {wrapped.root} was altered, or belongs elsewhere"
            ) from None

    def rotate(self) -> str:
        self._now()
        # Two concurrent rotations would lose one of the new keys, and what it wraps.
        with translate_os_errors(self._path, "rotated"), directory_lock(self._path.parent):
            held, _ = read_key_file(self._path)
            write_key_file(
                replace(held, roots=held.roots | {max(held.roots) + 1: new_key()}), self._path, os.replace
            )
        return self.root

    def sign(self, message: bytes) -> bytes:
        return Ed25519PrivateKey.from_private_bytes(self._now().signing).sign(message)

    def public_key(self) -> bytes:
        return Ed25519PrivateKey.from_private_bytes(self._now().signing).public_key().public_bytes_raw()

    def sign_ecdsa(self, message: bytes) -> EcdsaSignature:
        key = self._now().ecdsa_keys()[-1]
        # The nonce comes from key and message: the same version is signed by the same bytes.
        signed = key.sign(message, ec.ECDSA(hashes.SHA256(), deterministic_signing=True))
        return EcdsaSignature(signed, _public_ecdsa(key))

    def ecdsa_keys(self) -> tuple[bytes, ...]:
        return tuple(_public_ecdsa(key) for key in self._now().ecdsa_keys())

    def rotate_ecdsa(self) -> bytes:
        self._now()
        seed = new_key()
        with translate_os_errors(self._path, "rotated"), directory_lock(self._path.parent):
            held, _ = read_key_file(self._path)
            write_key_file(replace(held, ecdsa=(*held.ecdsa, seed)), self._path, os.replace)
        return _public_ecdsa(_ecdsa_key(seed))

    def keep(self, name: str, value: bytes) -> None:
        self._now()
        path = self._kept_path(name)
        with translate_os_errors(path, "written"), directory_lock(path.parent):
            write_private_file(value, path, os.replace)

    def kept(self, name: str) -> bytes | None:
        self._now()
        path = self._kept_path(name)
        with translate_os_errors(path, "read"):
            return path.read_bytes() if path.exists() else None

    def _kept_path(self, name: str) -> Path:
        return self._path.with_name(f"{self._path.stem}.{name}")

    def close(self) -> None:
        self._closed = True

    def __repr__(self) -> str:
        return f"KeyFile({str(self._path)!r})"

    def _now(self) -> KeyMaterial:
        """Return the keys, and read the file again if it has changed."""
        if self._closed:
            raise errors.KeyUnavailable(f"the key file {self._path} was closed")
        with translate_os_errors(self._path, "read"):
            seen = FileVersion.of(os.stat(self._path, follow_symlinks=False))
        if seen != self._seen:
            self._secrets, self._seen = read_key_file(self._path)
        return self._secrets


@dataclass(frozen=True, repr=False)
class KeyMaterial:
    """The content of a key file. Root keys are named by file and version, from 1; old versions may be removed."""

    name: str
    roots: dict[int, bytes]
    signing: bytes
    ecdsa: tuple[bytes, ...] = ()
    """Seeds of the second and later P-256 keys; the first one comes from `signing`."""

    @property
    def newest(self) -> str:
        return f"{self.name}-{max(self.roots)}"

    def root(self, name: str) -> bytes:
        for version, root in self.roots.items():
            if name == f"{self.name}-{version}":
                return root
        raise errors.KeyUnavailable(f"root key {name} is not in this key file, which holds {self.name}-…")

    def ecdsa_keys(self) -> list[ec.EllipticCurvePrivateKey]:
        """Return every version of the P-256 key, oldest first."""
        return [_ecdsa_key(seed) for seed in (self.signing, *self.ecdsa)]

    def to_json(self) -> str:
        fields = {
            "about": ABOUT,
            "format": FORMAT,
            "name": self.name,
            "roots": {version: root.hex() for version, root in self.roots.items()},
            "signing": self.signing.hex(),
            "ecdsa": [seed.hex() for seed in self.ecdsa],
        }
        return json.dumps(fields, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: bytes) -> KeyMaterial:
        fields = json.loads(text)
        if fields["format"] != FORMAT:
            raise ValueError("another format")
        if not isinstance(fields["roots"], dict):
            raise ValueError("roots without versions")
        roots = {int(version): bytes.fromhex(root) for version, root in fields["roots"].items()}
        signing = bytes.fromhex(fields["signing"])
        ecdsa = tuple(bytes.fromhex(seed) for seed in fields["ecdsa"])
        if not roots or any(len(key) != KEY_BYTES for key in (*roots.values(), signing, *ecdsa)):
            raise ValueError("a key of another length")
        return cls(str(fields["name"]), roots, signing, ecdsa)


@dataclass(frozen=True)
class FileVersion:
    """Identifies the state of the file that was read, including its mode and owner."""

    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileVersion:
        return cls(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def new_key() -> bytes:
    return os.urandom(KEY_BYTES)


def _ecdsa_key(seed: bytes) -> ec.EllipticCurvePrivateKey:
    """Return the P-256 key of a seed; 16 more bytes than the order has make the remainder uniform."""
    expanded = HKDF(hashes.SHA256(), 48, salt=None, info=ECDSA_INFO).derive(seed)
    return ec.derive_private_key(int.from_bytes(expanded, "big") % (P256_ORDER - 1) + 1, P256)


def _public_ecdsa(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def read_key_file(path: Path) -> tuple[KeyMaterial, FileVersion]:
    """Return the content of the file. Raise KeyUnavailable if others could read or write it."""
    with translate_os_errors(path, "read"):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        check_ownership(path, found)
        text = file.read()
    return parse_key_file(text, path), FileVersion.of(found)


def parse_key_file(text: bytes, path: Path) -> KeyMaterial:
    """Return the keys in the text of the file at `path`. Raise KeyUnavailable if it is damaged."""
    try:
        return KeyMaterial.from_json(text)
    except (ValueError, KeyError, TypeError):
        fault = errors.Fault(where=str(path), fix="restore your offline copy of the key file")
        raise errors.KeyUnavailable("the key file is damaged", faults=[fault]) from None


def public_key_in(text: bytes, path: Path) -> bytes:
    """Return the public key of the signing key in the text of the key file at `path`, or of a copy of it."""
    signing = parse_key_file(text, path).signing
    return Ed25519PrivateKey.from_private_bytes(signing).public_key().public_bytes_raw()


def check_ownership(path: Path, found: os.stat_result) -> None:
    faults = []
    if not stat.S_ISREG(found.st_mode):
        faults.append(errors.Fault(where=str(path), given="not a regular file", allowed="a file"))
    if found.st_uid != os.geteuid():
        fix = f"chown {os.geteuid()} {path}"
        allowed = f"owner {os.geteuid()}, who runs this"
        faults.append(errors.Fault(where=str(path), given=f"owner {found.st_uid}", allowed=allowed, fix=fix))
    if found.st_mode & 0o077:
        mode = f"mode {stat.S_IMODE(found.st_mode):04o}"
        faults.append(errors.Fault(where=str(path), given=mode, allowed="mode 0600", fix=f"chmod 600 {path}"))
    if faults:
        raise errors.KeyUnavailable(
            f"the key file {path} is refused: others could read or change it", faults=faults
        )


@contextmanager
def translate_os_errors(path: Path, verb: str) -> Iterator[None]:
    try:
        yield
    except OSError as fault:
        raise errors.KeyUnavailable(f"the key file {path} cannot be {verb}: {fault.strerror}") from None


@contextmanager
def directory_lock(directory: Path) -> Iterator[None]:
    """Hold the lock of `directory`, so that no other process creates or rotates a key file there."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
        os.fsync(handle)
    finally:
        os.close(handle)


def write_key_file(held: KeyMaterial, path: Path, put: Callable[[Path, Path], None]) -> None:
    write_private_file(held.to_json().encode(), path, put)


def write_private_file(content: bytes, path: Path, put: Callable[[Path, Path], None]) -> None:
    """Write a draft, flush it, then `put` it in place. The caller holds the lock, so other drafts are leftovers."""
    for leftover in path.parent.glob(f".{path.name}.*"):
        leftover.unlink()
    aside = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        put(aside, path)
    finally:
        aside.unlink(missing_ok=True)
