"""The data keys: one per workspace, wrapped by the key service, unwrapped only in memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from sqlalchemy import RowMapping, insert, select, update

from falaj.errors import Damaged, KeyUnavailable
from falaj.governance.encryption.frames import DataKey
from falaj.governance.encryption.signing_keys import SigningKey
from falaj.governance.policy.epochs import RecentEpoch, advance_epoch
from falaj.governance.tables import data_keys
from falaj.ports.keys import KeyService, WrappedKey
from falaj.ports.metadata import Database, Transaction
from falaj.records.governance.keys import SigningKeyRotation
from falaj.records.names import ROOT

KEY_BYTES = 32
NONCE_BYTES = 12


class Keyring:
    """Caches unwrapped data keys until the epoch moves, so that a destroyed key is gone in every process."""

    def __init__(self, database: Database, keys: KeyService) -> None:
        self._database = database
        self._keys = keys
        self._epoch = RecentEpoch(database)
        self._known = _Known(-1)
        self._derived: dict[str, bytes] = {}

    def current(self, workspace: str) -> DataKey:
        """Return the key that encrypts now."""
        keys = self._keys_of(workspace)
        version = max(keys)
        return DataKey(version, keys[version])

    def version(self, workspace: str, version: int) -> bytes:
        """Return the key that encrypted under `version`."""
        try:
            return self._keys_of(workspace)[version]
        except KeyError:
            raise KeyUnavailable(f"workspace {workspace} has no data key {version}") from None

    def derived(self, purpose: str) -> bytes:
        """Derive a key for one purpose of the platform itself."""
        if purpose not in self._derived:
            root = self.version(ROOT, 1)
            self._derived[purpose] = HKDF(SHA256(), KEY_BYTES, None, f"falaj {purpose}".encode()).derive(root)
        return self._derived[purpose]

    def seal(self, data: bytes, *, context: bytes) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        return nonce + AESGCM(self.derived("seal")).encrypt(nonce, data, context)

    def unseal(self, sealed: bytes, *, context: bytes) -> bytes:
        try:
            return AESGCM(self.derived("seal")).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], context)
        except InvalidTag:
            raise Damaged("a sealed value in the metadata database was altered") from None

    def create(self, tx: Transaction, workspace: str, *, now: datetime) -> None:
        """Create the first data key of a workspace."""
        wrapped = self._keys.wrap(os.urandom(KEY_BYTES), context=_context(workspace, 1))
        row = {"workspace": workspace, "version": 1, "created_at": now}
        tx.execute(insert(data_keys), row | {"root": wrapped.root, "wrapped": wrapped.ciphertext})

    def rotate(self, tx: Transaction) -> tuple[str, int]:
        """Make a new root key and wrap every data key with it; no blob is rewritten. Its name, and how many."""
        root = self._keys.rotate()
        living = select(data_keys).where(data_keys.c.wrapped.is_not(None))
        rows = tx.execute(living.with_for_update()).mappings().all()  # one destroyed meanwhile must stay so
        for row in rows:
            context = _context(row["workspace"], row["version"])
            secret = self._keys.unwrap(WrappedKey(row["root"], bytes(row["wrapped"])), context=context)
            wrapped = self._keys.wrap(secret, context=context)
            tx.execute(
                update(data_keys)
                .where(data_keys.c.workspace == row["workspace"], data_keys.c.version == row["version"])
                .values(root=wrapped.root, wrapped=wrapped.ciphertext)
            )
        advance_epoch(tx)
        return root, len(rows)

    def rotate_signing(self) -> SigningKeyRotation:
        """Make a new P-256 key for signatures, which needs no transaction: earlier keys go on to verify."""
        made = SigningKey.from_der(self._keys.rotate_ecdsa())
        return SigningKeyRotation(fingerprint=made.fingerprint, keys=len(self._keys.ecdsa_keys()))

    def destroy(self, tx: Transaction, workspace: str, *, now: datetime) -> list[int]:
        """Remove every key of `workspace`: what they encrypted is erased. The versions that were there."""
        living = data_keys.c.workspace == workspace, data_keys.c.wrapped.is_not(None)
        versions = tx.execute(select(data_keys.c.version).where(*living)).scalars().all()
        tx.execute(update(data_keys).where(*living).values(wrapped=None, destroyed_at=now))
        advance_epoch(tx)
        return list(versions)

    def _keys_of(self, workspace: str) -> dict[int, bytes]:
        """The data keys of a workspace by version, as they were when the epoch last moved."""
        epoch, known = self._epoch.value(), self._known
        if epoch != known.epoch:
            known = self._known = _Known(epoch)
        keys = known.keys.get(workspace)
        if keys is None:
            keys = known.keys[workspace] = self._unwrapped(workspace)
        return keys

    def _unwrapped(self, workspace: str) -> dict[int, bytes]:
        query = select(data_keys).where(data_keys.c.workspace == workspace).order_by(data_keys.c.version)
        with self._database.read() as tx:
            rows = tx.execute(query).mappings().all()
        if not _living(rows):
            raise KeyUnavailable(
                f"the data keys of workspace {workspace} {'were destroyed' if rows else 'do not exist'}: "
                "its blobs cannot be read or written"
            )
        return {
            row["version"]: self._keys.unwrap(
                WrappedKey(row["root"], bytes(row["wrapped"])), context=_context(workspace, row["version"])
            )
            for row in _living(rows)
        }


@dataclass
class _Known:
    """The keys that were unwrapped at one epoch."""

    epoch: int
    keys: dict[str, dict[int, bytes]] = field(default_factory=dict)


def require_living_key(tx: Transaction, workspace: str) -> None:
    """Raise KeyUnavailable if the keys of `workspace` were destroyed: what they encrypted must not be published."""
    living = select(data_keys.c.version).where(
        data_keys.c.workspace == workspace, data_keys.c.wrapped.is_not(None)
    )
    if tx.execute(living.limit(1).with_for_update(read=True)).first() is None:  # none is, until `tx` ends
        raise KeyUnavailable(f"the data keys of workspace {workspace} were destroyed")


def has_living_key(tx: Transaction, workspace: str) -> bool:
    """Tell whether data that `workspace` encrypted can still be read, as of `tx`."""
    living = data_keys.c.workspace == workspace, data_keys.c.wrapped.is_not(None)
    return tx.execute(select(data_keys.c.version).where(*living).limit(1)).first() is not None


def stop_publishing(tx: Transaction, workspace: str) -> None:
    """Block `require_living_key` for `workspace` until `tx` ends; wait for transactions that passed it."""
    tx.execute(select(data_keys.c.version).where(data_keys.c.workspace == workspace).with_for_update())


def _living(rows: Sequence[RowMapping]) -> list[RowMapping]:
    return [row for row in rows if row["wrapped"] is not None]


def _context(workspace: str, version: int) -> bytes:
    return f"falaj data key/{workspace}/{version}".encode()
