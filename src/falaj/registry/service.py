"""The operations of the model registry: register, promote, approve, roll back, verify, read, export."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import AwareDatetime, Field
from sqlalchemy import RowMapping

from falaj.errors import Conflict, Damaged, FalajError, NotFound
from falaj.governance import objects
from falaj.governance.lineage import graph
from falaj.governance.operations.call import Call, current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import ByteStream, Mode, operation
from falaj.governance.operations.pagination import list_page, visible_after
from falaj.governance.policy.implied_actions import ASSIGN
from falaj.ports.keys import KeyService
from falaj.ports.metadata import Transaction
from falaj.ports.parsers import ParserPool
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import Cursor, Page, PageSize, StoredObject
from falaj.records.names import AnyRef, BlobRef, Name, ObjectId, WorkspaceRef, new_id
from falaj.records.registry import (
    Alias,
    AliasChange,
    AliasMove,
    AliasName,
    Approval,
    BatchRows,
    CardText,
    Cpus,
    Environment,
    ExportTarget,
    FilePath,
    GpuCount,
    MemoryBytes,
    Metrics,
    Model,
    ModelExport,
    ModelFile,
    ModelManifest,
    ModelRef,
    ModelVersion,
    ModelVersionRef,
    Promotion,
    StorageUri,
    TensorSpec,
    Text,
    VersionCheck,
)
from falaj.registry import aliases, manifests, store
from falaj.registry.exports.kserve import NodeTerms
from falaj.registry.exports.layout import ExportOptions, ExportSubject
from falaj.registry.exports.plan import plan_export, read_subject
from falaj.registry.files import ModelBlobSource, check_files, read_range, require_same, verified
from falaj.registry.formats import model_format, require_signature
from falaj.registry.registration import inspect_files, model_object, require_placed

Position = Annotated[int, Field(ge=1, le=2**31)]
Files = Annotated[tuple[BlobRef, ...], Field(min_length=1, max_length=1000)]
Paths = Annotated[tuple[FilePath, ...], Field(max_length=1000)]
Tensors = Annotated[tuple[TensorSpec, ...], Field(max_length=1000)]


class Models:
    """Register model versions, and choose which of them is in use."""

    def __init__(
        self,
        gate: Gate,
        blobs: ModelBlobSource,
        keys: KeyService,
        *,
        parsers: ParserPool,
        node_terms: NodeTerms = lambda _zones: [],
    ) -> None:
        self.gate = gate
        self._node_terms = node_terms
        self.open_version = self._open_version
        self._blobs = blobs
        self._keys = keys
        self._parsers = parsers
        self._approval_policy = aliases.ApprovalPolicy(gate)

    @operation("models.register", resource="workspace", mode=Mode.LATE)
    def register(
        self,
        name: Name,
        *,
        files: Files,
        paths: Paths = (),
        workspace: WorkspaceRef | None = None,
        training_set: AnyRef | None = None,
        run: AnyRef | None = None,
        sources: tuple[AnyRef, ...] = (),
        inputs: Tensors = (),
        outputs: Tensors = (),
        metrics: Metrics | None = None,
        environment: Environment | None = None,
        card: CardText = "",
    ) -> ModelVersion:
        """Register uploaded blobs as the next version of a model, signed and immutable; create the model on first use.

        `paths` name the files in the version, in the order of `files`; by default they keep the names of their blobs.
        Training set, run and sources are the origins of the version: it inherits their restrictions.
        """
        call = current_call()
        with self.gate.database.read() as tx:
            blobs = require_placed(self.gate, call, tx, self._blobs, call.referred["files"])
        inspected = inspect_files(blobs, paths, self._blobs, self._parsers, owner=call.caller.id)
        found = model_format([file.format for file in inspected])
        require_signature(found, inputs, outputs)
        facts: dict[str, object] = {
            "format": found,
            "files": tuple(inspected),
            "inputs": inputs,
            "outputs": outputs,
            "metrics": metrics or {},
            "environment": environment or {},
            "card": card,
        }

        def publish() -> ModelVersion:
            if [found.id for found in call.referred["files"]] != [blob.id for blob in blobs]:
                raise Conflict("a blob's name was given to another blob; try again")
            for blob in require_placed(self.gate, call, call.tx, self._blobs, call.referred["files"]):
                self._blobs.keep(call.tx, blob, now=call.now)
            target = call.object("workspace")
            self.gate.named(call, "model", name, workspace=target)
            new = model_object(call, name, workspace=target)
            model = store.find_or_create_model(call.tx, name, workspace=target, new=new)
            origins = {
                "training_set": None if training_set is None else call.object("training_set").id,
                "run": None if run is None else call.object("run").id,
                "sources": tuple(found.id for found in call.referred["sources"]),
            }
            return self._sign_and_add(
                call, name, model, workspace=target, zone=blobs[0].zone, facts=facts | origins
            )

        return self.gate.commit(call, publish)

    @operation("models.list", resource="workspace", mode=Mode.READ)
    def list(
        self, *, workspace: WorkspaceRef | None = None, after: Cursor = "", limit: PageSize = 100
    ) -> Page[Model]:
        """List the models of a workspace, and where their aliases point."""
        call = current_call()
        return list_page(
            self.gate,
            ["model"],
            lambda page: _model_records(call.tx, page),
            after=after,
            limit=limit,
            workspace=call.object("workspace").id,
        )

    @operation("models.show", resource="model", mode=Mode.READ)
    def show(self, model: ModelRef) -> Model:
        """Show a model, and where its aliases point."""
        call = current_call()
        return _model_records(call.tx, [call.object("model")])[0]

    @operation("models.version", resource="model_version", mode=Mode.READ)
    def version(self, model: ModelVersionRef) -> ModelVersion:
        """Show one model version, such as churn@14."""
        call = current_call()
        return self._open_version(call.tx, call.object("model"))

    @operation("models.versions", resource="model", mode=Mode.READ)
    def versions(
        self, model: ModelRef, *, before: Position | None = None, limit: PageSize = 100
    ) -> Page[ModelVersion]:
        """List the versions of a model, newest first."""
        call = current_call()
        target = call.object("model")
        seen = visible_after(
            self.gate,
            lambda conditions, position, count: store.version_objects(
                call.tx, target.id, before=position, limit=count, conditions=conditions
            ),
            lambda _, row: int(row["number"]),
            after=before,
            limit=limit + 1,
            kinds=["model_version"],
            workspace=target.workspace,
        )
        shown = seen[:limit]
        items = tuple(self._version_record(found, row) for found, row in shown)
        return Page(items=items, next=str(items[-1].number) if len(seen) > limit else None)

    @operation("models.promote", resource="model_version")
    def promote(self, model: ModelVersionRef, *, to: AliasName) -> Promotion:
        """Point an alias at a version; the earlier target stays in the alias's history.

        A protected alias moves only to a version that an approver other than its author has approved for it. A policy
        may demand approvals too (`models.assign`).
        """
        call = current_call()
        version = self._open_version(call.tx, call.object("model"))
        self._require_assignable(call, version, call.object("model"), to, AliasMove.PROMOTE)
        call.event_data["alias"] = to
        return aliases.promote(call, version, to)

    @operation("models.approve", resource="model_version", allow=Role.APPROVER)
    def approve(self, model: ModelVersionRef, *, alias: AliasName, comment: Text = "") -> Approval:
        """Approve a version that you did not make for an alias; the approval holds for this version and alias only."""
        call = current_call()
        return aliases.approve(
            call, self._open_version(call.tx, call.object("model")), alias, comment=comment
        )

    @operation("models.approvals", resource="model_version", mode=Mode.READ)
    def approvals(self, model: ModelVersionRef, *, alias: AliasName) -> Page[Approval]:
        """List the valid approvals of a version for an alias."""
        call = current_call()
        return Page(items=tuple(store.approvals_of(call.tx, call.object("model").id, alias)))

    @operation("models.protect", resource="model", allow=Role.ADMIN)
    def protect(self, model: ModelRef, *, alias: AliasName, independent: bool = False) -> Alias:
        """Protect an alias: it may move only to versions that someone other than their author has approved.

        independent: count only approvals of those whom the author did not appoint, directly or through others. This
        cannot be undone.
        """
        call = current_call()
        return aliases.protect(call, call.object("model").id, alias, independent=independent)

    @operation("models.rollback", resource="model")
    def rollback(self, model: ModelRef, *, alias: AliasName) -> Promotion:
        """Point an alias back at its previous version; the version that it leaves needs a new approval to return."""
        call = current_call()
        target = call.object("model")
        call.event_data["alias"] = alias
        to = aliases.rollback_target(call.tx, target, alias)
        found = self._version_object(call.tx, to)
        version = self._open_version(call.tx, found)
        self._require_assignable(call, version, found, alias, AliasMove.ROLLBACK)
        return aliases.roll_back(call, target, alias, to=version)

    @operation("models.alias_history", resource="model", mode=Mode.READ)
    def alias_history(
        self, model: ModelRef, *, alias: AliasName, before: Position | None = None, limit: PageSize = 100
    ) -> Page[AliasChange]:
        """List every move of an alias, newest first: from which version to which, by whom and when."""
        call = current_call()
        found = store.changes(call.tx, call.object("model").id, alias, before=before, limit=limit + 1)
        items = tuple(found[:limit])
        return Page(items=items, next=str(items[-1].seq) if len(found) > limit else None)

    @operation("models.resolve", resource="model", mode=Mode.READ)
    def resolve(self, model: ModelRef, *, alias: AliasName, at: AwareDatetime | None = None) -> ModelVersion:
        """Return the version that an alias points at now, or pointed at at a given time."""
        call = current_call()
        target = call.object("model")
        when = "now" if at is None else f"at {at.isoformat()}"
        pointed = store.version_at(call.tx, target.id, alias, at=at)
        found = self._version_object(call.tx, aliases.require_known(pointed, target.name, alias, when=when))
        if not self.gate.visible([found]):
            raise objects.unknown(f"{target.name}@{alias}", "model_version")
        return self._open_version(call.tx, found)

    @operation("models.verify", resource="model_version", mode=Mode.FREE)
    def verify(self, model: ModelVersionRef) -> Iterator[VersionCheck]:
        """Check the signature of a version and the hashes of its files; stream the progress and then the result."""
        target = current_call().object("model")
        try:
            with self.gate.database.read() as tx:
                version = self._open_version(tx, target)
        except FalajError as error:
            return iter([VersionCheck(version=target.name, finished=True, problems=(error.message,))])
        return check_files(version, self._blobs, self.gate.database)

    @operation("models.read", resource="model_version", mode=Mode.FREE)
    def read(self, model: ModelVersionRef, file: FilePath) -> ByteStream:
        """Stream the bytes of one file of a version, after verifying its signature. Discard them if the stream breaks.

        The last chunk is sent only after the hash of the whole file matches the manifest.
        """
        with self.gate.database.read() as tx:
            version = self._open_version(tx, current_call().object("model"))
            found = _file(version, file)
            blob = self._blobs.facts(tx, found.blob)
        require_same(found, blob)
        return verified(found, self._blobs.read(blob))

    @operation("models.export", resource="model_version", mode=Mode.LATE, allow=Role.VIEWER, exports=True)
    def export(
        self,
        model: ModelVersionRef,
        *,
        to: ExportTarget,
        storage_uri: StorageUri | None = None,
        cpus: Cpus | None = None,
        memory_bytes: MemoryBytes | None = None,
        gpus: GpuCount = 0,
        max_batch_rows: BatchRows = 64,
    ) -> ModelExport:
        """Lay a version out for Triton, KServe or a machine without the platform; the bytes follow by models.read.

        It takes the right to read the files, and is recorded in the audit log and in lineage before they leave.
        """
        call = current_call()
        options = ExportOptions(
            storage_uri=storage_uri,
            cpus=cpus,
            memory_bytes=memory_bytes,
            gpus=gpus,
            max_batch_rows=max_batch_rows,
        )
        target = call.object("model")
        subject = self._read_subject(call, target)

        def record() -> ModelExport:
            found = call.object("model")
            if found.id != target.id:
                raise Conflict("the alias has moved to another version; try again")
            self.gate.require(call, "models.read", found)
            call.details["exported_to"] = to.value
            call.event_data["to"] = to.value
            graph.leave(call, [found])
            return plan_export(
                replace(subject, version=self._open_version(call.tx, found)),  # its label may have changed
                _signed_manifest(_version_row(call.tx, found)),
                self._keys,
                to=to,
                options=options,
                zones=self.gate.zones.all(),
                node_terms=self._node_terms,
            )

        return self.gate.commit(call, record)

    def _read_subject(self, call: Call, target: StoredObject) -> ExportSubject:
        """Read the tensors of a version from its file, if the caller may read its files."""
        with self.gate.database.read() as tx:
            self.gate.require(call, "models.read", target, tx=tx)
            version = self._open_version(tx, target)
            blobs = {file.path: self._blobs.facts(tx, file.blob) for file in version.files}
        for file in version.files:
            require_same(file, blobs[file.path])

        def read(file: ModelFile, offset: int, length: int) -> bytes:
            return read_range(self._blobs, blobs[file.path], offset, length)

        return read_subject(version, read, self._parsers, owner=call.caller.id)

    def _require_assignable(
        self, call: Call, version: ModelVersion, found: StoredObject, alias: str, move: AliasMove
    ) -> None:
        """Raise Denied if a policy forbids that `alias` points at `version`, with the approvals that it has."""
        doing = f"point {alias} at {version.reference}"
        besides = {"alias": alias, "move": str(move)}
        self._approval_policy.require(call, ASSIGN, found, version, doing=doing, besides=besides)

    def _sign_and_add(
        self,
        call: Call,
        name: str,
        model: ObjectId,
        *,
        workspace: StoredObject,
        zone: str,
        facts: dict[str, object],
    ) -> ModelVersion:
        number = store.next_number(call.tx, model)
        ident = new_id("version")
        new = call.create("model_version", f"{name}@{number}", workspace=workspace, zone=zone, ident=ident)
        manifest = ModelManifest.model_validate(
            {
                "platform": self.gate.audit.log_id,
                "workspace": new.workspace,
                "id": ident,
                "model": model,
                "name": name,
                "number": number,
                "author": call.caller.id,
                "created_at": call.now,
                **facts,
            }
        )
        signed = manifests.sign(manifest, self._keys)
        store.add_version(
            call.tx,
            ident,
            model=model,
            number=number,
            manifest=signed.text,
            key=signed.key,
            signature=signed.signature,
        )
        return self._open_version(call.tx, new)

    def _open_version(self, tx: Transaction, found: StoredObject) -> ModelVersion:
        """Return the version. Raise Damaged unless its manifest is signed, and signed for this object."""
        return self._version_record(found, _version_row(tx, found))

    def _version_record(self, found: StoredObject, row: RowMapping) -> ModelVersion:
        signed = _signed_manifest(row)
        manifest = manifests.verify_manifest(signed, self._keys, reference=found.name)
        stored = (self.gate.audit.log_id, found.workspace, found.id, row["model"], row["number"], found.name)
        meant = (
            *(manifest.platform, manifest.workspace, manifest.id),
            *(manifest.model, manifest.number, manifest.reference),
        )
        if stored != meant:
            raise Damaged(f"{found.name} has the manifest of another version, {manifest.reference}")
        return ModelVersion(
            **{name: getattr(manifest, name) for name in ModelManifest.model_fields},
            key=signed.key,
            signature=signed.signature,
            label=found.label,
        )

    def _version_object(self, tx: Transaction, ident: ObjectId) -> StoredObject:
        found = objects.by_id(tx, ident)
        if found is None:
            raise NotFound(f"the version {ident} was deleted")
        return found


def _version_row(tx: Transaction, found: StoredObject) -> RowMapping:
    row = store.version_row(tx, found.id)
    if row is None:
        raise Damaged(f"the manifest of {found.name} is missing")
    return row


def _signed_manifest(row: RowMapping) -> manifests.SignedManifest:
    return manifests.SignedManifest(text=row["manifest"], key=row["key"], signature=row["signature"])


def _model_records(tx: Transaction, page: Sequence[StoredObject]) -> builtins.list[Model]:
    idents = [found.id for found in page]
    counts, pointed = store.version_counts(tx, idents), aliases.aliases_of(tx, idents)
    return [
        Model(
            id=found.id,
            workspace=found.workspace,
            name=found.name,
            versions=counts[found.id],
            aliases=pointed[found.id],
            created_at=found.created_at,
        )
        for found in page
    ]


def _file(version: ModelVersion, path: str) -> ModelFile:
    for file in version.files:
        if file.path == path:
            return file
    raise NotFound(
        f"{version.reference} has no file {path!r}; it has {', '.join(f.path for f in version.files[:20])}"
    )
