"""What must hold before blobs become a version."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from falaj.errors import Denied, FalajError, Fault, InvalidInput
from falaj.governance.operations.call import Call
from falaj.governance.operations.gate import Gate
from falaj.ports.metadata import Transaction
from falaj.records.governance.blobs import Blob
from falaj.records.governance.objects import StoredObject
from falaj.records.names import PrincipalId, new_id
from falaj.records.registry import ModelFile
from falaj.registry.files import ModelBlobSource, inspect


def require_placed(gate: Gate, call: Call, tx: Transaction, source: ModelBlobSource) -> list[Blob]:
    """The blobs that are to become a version, if they may: readable, at home here, all in one legal zone."""
    found = call.referred["files"]
    for each in found:
        # Whoever may read the version reads its files, so registering them takes the right to read them.
        if not gate.authorizer.decide(tx, call.caller, "blobs.read", each).allowed:
            raise Denied(f"{call.caller.name} may not blobs.read on {each.address}")
    strangers = [each.name for each in found if each.workspace != call.target.id]
    if strangers:
        raise InvalidInput.at(
            "files",
            given=strangers[0],
            allowed=f"blobs of workspace {call.target.name}",
            fix="upload it there, with the original among its sources",
        )
    blobs = [source.facts(tx, each.id) for each in found]
    zones = sorted({blob.zone for blob in blobs})
    if len(zones) > 1:
        raise InvalidInput.at("files", given=f"zones {', '.join(zones)}", allowed="files in one zone")
    seen = partial(gate.authorizer.sees, tx, call.caller)
    gate.zones.require(tx, [*call.sources(), call.target], gate.zones.named(zones[0]), seen=seen)
    return blobs


def inspect_files(blobs: Sequence[Blob], paths: Sequence[str], source: ModelBlobSource) -> list[ModelFile]:
    """The blobs as files of a version, by path; all that are refused at once."""
    called = _paths(blobs, paths)
    files: list[ModelFile] = []
    faults: list[Fault] = []
    for path, blob in sorted(zip(called, blobs, strict=True), key=lambda pair: pair[0]):
        try:
            files.append(inspect(path, blob, source))
        except InvalidInput as error:
            faults += error.faults
    if faults:
        raise _refused(faults)
    return files


def model_object(call: Call, name: str) -> StoredObject:
    """The object of a model that has no version yet. What flows into a version does not restrict its model's name."""
    return StoredObject(
        id=new_id("model"),
        workspace=call.target.id,
        kind="model",
        name=name,
        owner=PrincipalId(call.caller.id),
        label=call.target.label,
        created_at=call.now,
    )


def _paths(blobs: Sequence[Blob], paths: Sequence[str]) -> list[str]:
    if paths and len(paths) != len(blobs):
        raise InvalidInput.at(
            "paths", given=f"{len(paths)} for {len(blobs)} files", allowed="one for each file, or none"
        )
    called = list(paths or [blob.name for blob in blobs])
    twice = sorted({path for path in called if called.count(path) > 1})
    if twice:
        raise InvalidInput.at("paths", given=twice[0], allowed="each path once")
    return called


def _refused(faults: list[Fault]) -> FalajError:
    return InvalidInput(
        f"{len(faults)} file{'s' * (len(faults) != 1)} cannot be part of a model version", faults=faults
    )
