"""Checks before blobs are registered as a model version."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from falaj.errors import Denied, FalajError, Fault, InvalidInput
from falaj.governance.operations.call import Call
from falaj.governance.operations.gate import Gate
from falaj.ports.metadata import Transaction
from falaj.ports.parsers import ParserPool
from falaj.records.governance.blobs import Blob
from falaj.records.governance.objects import StoredObject
from falaj.records.names import PrincipalId, new_id
from falaj.records.registry import ModelFile
from falaj.registry.files import ModelBlobSource, inspect


def require_placed(
    gate: Gate, call: Call, tx: Transaction, source: ModelBlobSource, found: Sequence[StoredObject]
) -> list[Blob]:
    """Return the blobs `found`, if the caller may read them and they lie in this workspace and one permitted zone."""
    for each in found:
        # A reader of the version can read its files, so registering them requires the right to read them.
        if not gate.authorizer.decide(tx, call.caller, "blobs.read", each).allowed:
            raise Denied(f"{call.caller.name} may not blobs.read on {each.address}")
    foreign = [each.name for each in found if each.workspace != call.target.id]
    if foreign:
        raise InvalidInput.at(
            "files",
            given=foreign[0],
            allowed=f"blobs of workspace {call.target.name}",
            fix="upload it there, and name the original in its sources",
        )
    blobs = [source.facts(tx, each.id) for each in found]
    zones = sorted({blob.zone for blob in blobs})
    if len(zones) > 1:
        raise InvalidInput.at("files", given=f"zones {', '.join(zones)}", allowed="files in one zone")
    seen = partial(gate.authorizer.sees, tx, call.caller)
    gate.zones.require(tx, [*call.sources(), call.target], gate.zones.named(zones[0]), seen=seen)
    return blobs


def inspect_files(
    blobs: Sequence[Blob],
    paths: Sequence[str],
    source: ModelBlobSource,
    parsers: ParserPool,
    *,
    owner: str,
) -> list[ModelFile]:
    """Inspect the blobs as files of a version, sorted by path. Raise InvalidInput with all faults."""
    names = _paths(blobs, paths)
    files: list[ModelFile] = []
    faults: list[Fault] = []
    for path, blob in sorted(zip(names, blobs, strict=True), key=lambda pair: pair[0]):
        try:
            files.append(inspect(path, blob, source, parsers, owner=owner))
        except InvalidInput as error:
            faults += error.faults
    if faults:
        raise _rejection(faults)
    return files


def model_object(call: Call, name: str, *, workspace: StoredObject) -> StoredObject:
    """Return the object of a model without versions. The origins of a version do not restrict its model's name."""
    return StoredObject(
        id=new_id("model"),
        workspace=workspace.id,
        kind="model",
        name=name,
        owner=PrincipalId(call.caller.id),
        label=workspace.label,
        created_at=call.now,
    )


def _paths(blobs: Sequence[Blob], paths: Sequence[str]) -> list[str]:
    if paths and len(paths) != len(blobs):
        raise InvalidInput.at(
            "paths", given=f"{len(paths)} for {len(blobs)} files", allowed="one for each file, or none"
        )
    names = list(paths or [blob.name for blob in blobs])
    folded = [path.casefold() for path in names]
    duplicates = sorted({path for path in names if folded.count(path.casefold()) > 1})
    if duplicates:
        raise InvalidInput.at(
            "paths", given=", ".join(duplicates[:2]), allowed="each path once, also without regard to case"
        )
    return names


def _rejection(faults: list[Fault]) -> FalajError:
    return InvalidInput(
        f"{len(faults)} file{'s' * (len(faults) != 1)} cannot be part of a model version", faults=faults
    )
