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
from falaj.records.models.facts import CodeReference, PackagePin
from falaj.records.names import PrincipalId, new_id, repeated_names
from falaj.records.registry import ModelFile
from falaj.registry.files import MODEL_FILE, ModelBlobSource, inspect
from falaj.registry.signing.versions import RESERVED


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
    parser: str = MODEL_FILE,
    code: CodeReference | None = None,
) -> list[ModelFile]:
    """Inspect the blobs as files of a version, sorted by path. Raise InvalidInput with all faults.

    The file that `code` names must define its entry point.
    """
    names = _paths(blobs, paths)
    files: list[ModelFile] = []
    faults: list[Fault] = []
    for path, blob in sorted(zip(names, blobs, strict=True), key=lambda pair: pair[0]):
        try:
            defines = code.definition if code is not None and code.file == path else ""
            files.append(inspect(path, blob, source, parsers, owner=owner, parser=parser, defines=defines))
        except InvalidInput as error:
            faults += error.faults
    if faults:
        raise _rejection(faults)
    return files


def require_consistent(
    files: Sequence[ModelFile], packages: Sequence[PackagePin], example: str | None
) -> None:
    """Raise InvalidInput if a package is named twice, or the example is none of the files beside the model."""
    if twice := repeated_names(each.name.replace("_", "-").replace(".", "-") for each in packages):
        raise InvalidInput.at("packages", given=", ".join(twice[:2]), allowed="each package once")
    beside = [file.path for file in files if not file.format.is_model]
    if example is not None and example not in beside:
        allowed = ", ".join(beside[:20]) or "a file beside the model, of which there is none"
        raise InvalidInput.at("example", given=example, allowed=allowed)


def pin_code(
    code: CodeReference | None,
    files: Sequence[ModelFile],
    packages: Sequence[PackagePin],
    archive: Blob | None,
) -> CodeReference | None:
    """Return a reference with the digest of its source. Raise InvalidInput if it pins none, or another."""
    if code is None:
        if archive is not None:
            raise InvalidInput.at(
                "archive", given=archive.name, allowed="together with the entry point of its code"
            )
        return None
    if code.archive is not None:
        raise InvalidInput.at("code.archive", given=code.archive, allowed="none: name the blob as `archive`")
    if archive is not None:
        code = CodeReference.model_validate(code.model_dump() | {"archive": archive.id})
        return _with_digest(code, archive.sha256)
    if code.file is not None:
        found = {file.path: file for file in files}.get(code.file)
        if found is None:
            shown = ", ".join(file.path for file in files[:20])
            raise InvalidInput.at("code.file", given=code.file, allowed=f"a file of the version: {shown}")
        return _with_digest(code, found.sha256)
    if code.package is not None:
        wanted = code.package.casefold().replace("_", "-").replace(".", "-")
        named = [
            each for each in packages if each.name.casefold().replace("_", "-").replace(".", "-") == wanted
        ]
        if not any(each.sha256 or each.files_sha256 for each in named):
            allowed = "one of `packages`, with a hash of its archive or of its files"
            raise InvalidInput.at("code.package", given=code.package, allowed=allowed)
        return code
    if code.commit is None:
        allowed = "a file of the version, a package, a commit of a repository, or an archive"
        raise InvalidInput.at("code", given=f"{code.entry}, without a place", allowed=allowed)
    return code


def _with_digest(code: CodeReference, sha256: str) -> CodeReference:
    if code.sha256 not in (None, sha256):
        raise InvalidInput.at("code.sha256", given=code.sha256, allowed=f"that of the source: {sha256}")
    return code.model_copy(update={"sha256": sha256})


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


def version_origins(
    call: Call, *, training_set: str | None, run: str | None, sources: Sequence[str]
) -> dict[str, object]:
    """Return the ids of what a version is made from."""
    return {
        "training_set": None if training_set is None else call.object("training_set").id,
        "run": None if run is None else call.object("run").id,
        "sources": tuple(found.id for found in call.referred["sources"]) if sources else (),
    }


def registered_blobs(call: Call, archive: str | None) -> list[StoredObject]:
    """Return the blobs that a version is registered with: its files, and the archive of its code."""
    return [*call.referred["files"], *([] if archive is None else [call.object("archive")])]


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
    taken = sorted(path for path in names if path.casefold() in RESERVED)
    if taken:
        raise InvalidInput.at(
            "paths",
            given=taken[0],
            allowed="a name that an export does not give to its manifest or its signature",
            fix=f"name it files/{taken[0]}",
        )
    return names


def _rejection(faults: list[Fault]) -> FalajError:
    return InvalidInput(
        f"{len(faults)} file{'s' * (len(faults) != 1)} cannot be part of a model version", faults=faults
    )
