"""The data keys: one per workspace, wrapped by the key service, unwrapped only in memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from sqlalchemy import RowMapping, insert, select, update

from falaj.errors import Damaged, KeyUnavailable
from falaj.governance.encryption.frames import DataKey
from falaj.governance.epochs import RecentEpoch, advance_epoch
from falaj.governance.tables import data_keys
from falaj.ports.keys import KeyService, WrappedKey
from falaj.ports.metadata import Database, Transaction
from falaj.records.names import ROOT

KEY_BYTES = 32
NONCE_BYTES = 12


class Keyring:
    """Hands out data keys; forgets them when the epoch moves, so that a destroyed key dies in every process."""

    def __init__(self, database: Database, keys: KeyService) -> None:
        self._database = database
        self._keys = keys
        self._epoch = RecentEpoch(database)
        self._known_at = -1
        self._known: dict[tuple[str, int], bytes] = {}
        self._newest: dict[str, int] = {}
        self._derived: dict[str, bytes] = {}

    def current(self, workspace: str) -> DataKey:
        """The key that encrypts now."""
        self._forget_if_stale()
        if workspace not in self._newest:
            self._load(workspace)
        version = self._newest[workspace]
        return DataKey(version, self._known[workspace, version])

    def version(self, workspace: str, version: int) -> bytes:
        """The key that encrypted under `version`."""
        self._forget_if_stale()
        if (workspace, version) not in self._known:
            self._load(workspace)
        try:
            return self._known[workspace, version]
        except KeyError:
            raise KeyUnavailable(f"workspace {workspace} has no data key {version}") from None

    def derived(self, purpose: str) -> bytes:
        """A key for one purpose of the platform's own."""
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
        """The first data key of a new workspace."""
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

    def destroy(self, tx: Transaction, workspace: str, *, now: datetime) -> list[int]:
        """Remove every key of `workspace`: what they encrypted is erased. The versions that were there."""
        living = data_keys.c.workspace == workspace, data_keys.c.wrapped.is_not(None)
        versions = tx.execute(select(data_keys.c.version).where(*living)).scalars().all()
        tx.execute(update(data_keys).where(*living).values(wrapped=None, destroyed_at=now))
        advance_epoch(tx)
        return list(versions)

    def _forget_if_stale(self) -> None:
        epoch = self._epoch.value()
        if epoch != self._known_at:
            self._known, self._newest, self._known_at = {}, {}, epoch

    def _load(self, workspace: str) -> None:
        query = select(data_keys).where(data_keys.c.workspace == workspace).order_by(data_keys.c.version)
        with self._database.read() as tx:
            rows = tx.execute(query).mappings().all()
        if not _living(rows):
            raise KeyUnavailable(
                f"the data keys of workspace {workspace} {'were destroyed' if rows else 'do not exist'}: "
                "its blobs cannot be read or written"
            )
        for row in _living(rows):
            wrapped = WrappedKey(row["root"], bytes(row["wrapped"]))
            secret = self._keys.unwrap(wrapped, context=_context(workspace, row["version"]))
            self._known[workspace, row["version"]] = secret
            self._newest[workspace] = row["version"]


def _living(rows: Sequence[RowMapping]) -> list[RowMapping]:
    return [row for row in rows if row["wrapped"] is not None]


def _context(workspace: str, version: int) -> bytes:
    return f"falaj data key/{workspace}/{version}".encode()
