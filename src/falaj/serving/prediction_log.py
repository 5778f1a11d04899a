"""The prediction log: encrypted batches of predictions, each an object with lineage."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import partial

from sqlalchemy import RowMapping

from falaj.errors import AlreadyExists, Damaged, InvalidInput, KeyUnavailable, NotFound
from falaj.governance import objects
from falaj.governance.encryption.blobs import EncryptedBlobs
from falaj.governance.encryption.digest import RunningDigest
from falaj.governance.encryption.keyring import has_living_key, require_living_key
from falaj.governance.operations import events
from falaj.governance.operations.call import Call
from falaj.governance.operations.gate import Gate
from falaj.ports.blobs import BlobKey
from falaj.ports.metadata import Transaction
from falaj.ports.parsers import ByteSource, ParserPool
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ObjectId
from falaj.records.serving.predictions import AnnouncedPredictions, PredictionBatch, PredictionRecord
from falaj.serving import store
from falaj.serving.prediction_batches import DecodedBatch, decode_batch, split_id

ARROW = "arrow"
"""The name of the parser, see assembly/parsing.py."""
PREDICTED = "endpoints.predicted"
"""The event that tells of the batches of a version since the last one; no operation has its name."""
DECODED_LIMIT = 512 << 20
CACHED_BATCHES = 32
"""Decoded batches that stay in memory, because labels arrive in groups."""


class PredictionLog:
    """Stores batches and finds predictions in them. `stores` are keyed by zone."""

    def __init__(self, gate: Gate, stores: Mapping[str, EncryptedBlobs], parsers: ParserPool) -> None:
        self._gate = gate
        self._parsers = parsers
        self._stores = stores
        self._decoded: OrderedDict[str, DecodedBatch] = OrderedDict()

    def add(
        self,
        call: Call,
        data: Iterator[bytes],
        endpoint: StoredObject,
        version: StoredObject,
        *,
        ident: ObjectId,
        rows: int,
    ) -> PredictionBatch:
        """Store the bytes of a batch, then publish it with edges from its endpoint, version and views.

        Raise AlreadyExists if it is published. Bytes alone are left by a try whose transaction failed: the database was
        full or away, and the model server sends the batch again.
        """
        zone = self._gate.zones.named(endpoint.zone)
        workspace_id = endpoint.workspace
        key = BlobKey(f"{self._gate.audit.log_id}/{workspace_id}/{ident}")
        with self._gate.database.read() as tx:
            if store.batch_row(tx, ident) is not None:
                raise AlreadyExists(f"the batch of predictions {ident} is stored already")
        self._stores[zone.name].delete(key)
        digest = RunningDigest()
        self._stores[zone.name].write(workspace_id, key, digest.follow(data))
        call.content = digest.hexdigest()

        def publish() -> PredictionBatch:
            require_living_key(call.tx, workspace_id)
            seen = partial(self._gate.authorizer.sees, call.tx, call.caller)
            self._gate.zones.require(call.tx, call.sources(), zone, seen=seen)
            workspace = objects.by_id(call.tx, workspace_id)
            if workspace is None:
                raise objects.unknown(workspace_id, "workspace")
            new = call.create("predictions", workspace=workspace, zone=zone.name, ident=ident)
            stored = store.add_batch(
                call.tx,
                new,
                endpoint=endpoint.id,
                version=version.name.rpartition("@")[2],
                rows=rows,
                key=key,
                size_bytes=digest.size_bytes,
                sha256=digest.hexdigest(),
            )
            store.count_unannounced(call.tx, stored, version=version.id)
            return stored

        return self._gate.commit(call, publish)

    def prediction(self, batch: StoredObject, ident: str) -> PredictionRecord:
        """Return the prediction `ident` of `batch`. Raise NotFound if the batch does not have it."""
        _, number, row = split_id(ident)
        with self._gate.database.read() as tx:
            facts = self._facts(tx, batch)
            endpoint = objects.ever(tx, facts["endpoint"])
        decoded = self._read(batch, facts)
        with self._gate.database.read() as tx:
            label, score = store.label_of(tx, decoded.named(ident))
        place = decoded.place(number, row)
        if place is None:
            raise NotFound(f"{batch.id} has no prediction {ident!r}; add the row number, like {ident}.0")
        return PredictionRecord(
            id=ident,
            endpoint=endpoint.name if endpoint else facts["endpoint"],
            model=decoded.facts["model"],
            version=facts["version"],
            shadow=decoded.is_shadow,
            label=label,
            score=score,
            **decoded.fields(place),
        )

    def open(self, batch: StoredObject) -> DecodedBatch:
        """Return the decoded batch."""
        with self._gate.database.read() as tx:
            facts = self._facts(tx, batch)
        return self._read(batch, facts)

    def _facts(self, tx: Transaction, batch: StoredObject) -> RowMapping:
        """Return the row of a batch. Raise KeyUnavailable, and clear the cache, if its key was destroyed."""
        row = store.batch_row(tx, batch.id)
        if row is None:
            raise objects.unknown(batch.id, "predictions")
        if not has_living_key(tx, batch.workspace):
            self._decoded.clear()
            raise KeyUnavailable(f"the data keys of workspace {batch.workspace} were destroyed")
        return row

    def _read(self, batch: StoredObject, facts: RowMapping) -> DecodedBatch:
        known = self._decoded.get(batch.id)
        if known is None:
            store_ = self._stores[batch.zone or self._gate.zones.default.name]
            known = self._decode(batch.workspace, BlobKey(facts["key"]), store_)
            self._decoded[batch.id] = known
            while len(self._decoded) > CACHED_BATCHES:
                self._decoded.popitem(last=False)
        return known

    def _decode(self, workspace: str, key: BlobKey, stored: EncryptedBlobs) -> DecodedBatch:
        """Decode a batch as if a stranger had sent it: the model server, which wrote it, runs models of users."""

        def read_range(offset: int, length: int) -> bytes:
            return b"".join(stored.read(workspace, key, start=offset, length=length))

        source = ByteSource(stored.size(key), read_range)
        try:
            parsed = self._parsers.parse(
                ARROW,
                [source],
                {"where": "predictions", "limit_bytes": DECODED_LIMIT},
                owner=workspace,
                reserve=_require_moderate,
            )
        except InvalidInput as error:
            raise Damaged(f"a batch of predictions cannot be read: {error}") from error
        return decode_batch(parsed.content, limit_bytes=2 * DECODED_LIMIT)


def announce_predictions(call: Call) -> AnnouncedPredictions:
    """Announce the batches that no event has told of: one event for each endpoint and version."""
    told = 0
    found = store.take_unannounced(call.tx)
    for each in found:
        endpoint = objects.ever(call.tx, each.endpoint)
        if endpoint is None:
            continue
        data = {
            "name": endpoint.name,
            "version": objects.name_of(call.tx, each.version),
            "batches": each.batches,
            "rows": each.rows,
            "since": each.since.isoformat(),
            "until": each.until.isoformat(),
            "newest": each.newest,
        }
        events.announce(call, PREDICTED, subject=endpoint, data=data)
        told += 1
    return AnnouncedPredictions(events=told, rows=sum(each.rows for each in found))


def _require_moderate(size_bytes: int) -> None:
    if size_bytes > 2 * DECODED_LIMIT:
        raise InvalidInput(f"{size_bytes} bytes of predictions, where {DECODED_LIMIT} are allowed")
