"""Model versions in the database: add the next one, signed, and open one if it is what was signed."""

from __future__ import annotations

from sqlalchemy import RowMapping

from falaj.errors import Conflict, Damaged, NotFound
from falaj.governance import objects
from falaj.governance.operations.call import Call
from falaj.governance.operations.gate import Gate
from falaj.governance.policy.implied_actions import STORE_PICKLE
from falaj.ports.metadata import Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ObjectId, new_id
from falaj.records.registry import FileFormat, ModelManifest, ModelVersion
from falaj.registry import store
from falaj.registry.registration import model_object
from falaj.registry.signing.versions import SignedManifest, VersionSignatures


class SignedVersions:
    """Adds versions and opens them; what was altered since it was signed is Damaged."""

    def __init__(self, gate: Gate, signatures: VersionSignatures) -> None:
        self._gate = gate
        self._signatures = signatures

    def may_pickle(self, call: Call, tx: Transaction) -> bool:
        """Tell whether a policy allows the caller to register pickles in the workspace of the call."""
        return self._gate.authorizer.decide_implied(tx, call.caller, STORE_PICKLE, call.target, {}).allowed

    def add(self, call: Call, name: str, *, zone: str, facts: dict[str, object]) -> ModelVersion:
        """Add the next version of the model `name` of the call's workspace, which is created on first use."""
        if facts["format"] is FileFormat.PICKLE and not self.may_pickle(call, call.tx):
            raise Conflict("the policy that allows pickles was withdrawn meanwhile")
        workspace = call.object("workspace")
        self._gate.named(call, "model", name, workspace=workspace)
        new_model = model_object(call, name, workspace=workspace)
        model = store.find_or_create_model(call.tx, name, workspace=workspace, new=new_model)
        number = store.next_number(call.tx, model, name=name)
        ident = new_id("version")
        new = call.create("model_version", f"{name}@{number}", workspace=workspace, zone=zone, ident=ident)
        manifest = ModelManifest.model_validate(
            {
                "platform": self._gate.audit.log_id,
                "workspace": new.workspace,
                "id": ident,
                "model": model,
                "name": name,
                "number": number,
                "author": call.caller.id,
                "created_at": call.now,
                "zone": zone,
                "residency": new.label,
                **facts,
            }
        )
        signed = self._signatures.sign(manifest)
        store.add_version(
            call.tx,
            ident,
            model=model,
            number=number,
            manifest=signed.text,
            key=signed.key,
            signature=signed.signature,
        )
        return self.open(call.tx, new)

    def open(self, tx: Transaction, found: StoredObject) -> ModelVersion:
        """Return the version. Raise Damaged unless its manifest is signed, and signed for this object."""
        return self.record(found, version_row(tx, found))

    def record(self, found: StoredObject, row: RowMapping) -> ModelVersion:
        signed = signed_manifest(row)
        manifest = self._signatures.verify(signed, reference=found.name)
        stored = (self._gate.audit.log_id, found.workspace, found.id, row["model"], row["number"], found.name)
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

    def by_id(self, tx: Transaction, ident: ObjectId) -> ModelVersion:
        return self.open(tx, self.object(tx, ident))

    def object(self, tx: Transaction, ident: ObjectId) -> StoredObject:
        found = objects.by_id(tx, ident)
        if found is None:
            raise NotFound(f"the version {ident} was deleted")
        return found


def version_row(tx: Transaction, found: StoredObject) -> RowMapping:
    row = store.version_row(tx, found.id)
    if row is None:
        raise Damaged(f"the manifest of {found.name} is missing")
    return row


def signed_manifest(row: RowMapping) -> SignedManifest:
    return SignedManifest(text=row["manifest"], key=row["key"], signature=row["signature"])
