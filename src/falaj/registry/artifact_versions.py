"""Versions made of what was logged: the files of a run, of a logged model or of another version, by reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pydantic import TypeAdapter, ValidationError

from falaj.errors import FalajError, Fault, InvalidInput, NotFound
from falaj.governance import objects
from falaj.governance.operations.call import Call
from falaj.governance.operations.gate import Gate
from falaj.ports.metadata import Transaction
from falaj.ports.parsers import ParserPool
from falaj.records.governance.blobs import Blob
from falaj.records.governance.objects import StoredObject
from falaj.records.models.facts import PackagePin
from falaj.records.names import ObjectId
from falaj.records.registry import FileFormat, FilePath, ModelFile, ModelVersion
from falaj.registry.dependencies import LoggedFiles
from falaj.registry.file_formats.mlflow_models import MLMODEL, REQUIREMENTS, safe_option
from falaj.registry.files import ModelBlobSource, byte_source
from falaj.registry.formats import model_format

READ_BY = {
    "run": "runs.read_artifact",
    "logged_model": "loggedmodels.read_artifact",
    "model_version": "models.read",
}
"""The kinds that versions are made of, and the action that the caller must be allowed to perform on each."""
MLFLOW_MODEL = "mlflow_model"
"""The name of the parser, see assembly/parsing.py."""
MOST_FILES = 1000

OpenVersion = Callable[[Transaction, StoredObject], ModelVersion]
_path = TypeAdapter(FilePath)
_pins = TypeAdapter(tuple[PackagePin, ...])


@dataclass(frozen=True)
class ArtifactPlan:
    """The blobs of a version to be by path, and its origins."""

    files: Mapping[str, ObjectId]
    run: ObjectId | None
    sources: tuple[ObjectId, ...]
    metrics: Mapping[str, float]

    def paths(self) -> tuple[str, ...]:
        return tuple(self.files)


class ArtifactPlanner:
    """Finds out of which blobs a version is made, if its caller may read them."""

    def __init__(self, gate: Gate, logged: LoggedFiles, open_version: OpenVersion) -> None:
        self._gate = gate
        self._logged = logged
        self._open_version = open_version

    def plan(self, call: Call, tx: Transaction, source: StoredObject, folder: str) -> ArtifactPlan:
        """Return the files in a folder of `source`, and where they come from."""
        if source.kind not in READ_BY:
            raise InvalidInput.at(
                "source", given=f"a {source.kind}", allowed="a run, a logged model or a model version"
            )
        self._gate.require(call, "models.register", call.target, tx=tx)
        self._gate.require(call, READ_BY[source.kind], source, tx=tx)
        found = self._of_version(tx, source, folder) or self._logged_to(tx, source, folder)
        _require_files(found.files, source, folder)
        return found

    def blobs(self, tx: Transaction, planned: ArtifactPlan) -> list[StoredObject]:
        """Return the objects of the planned blobs."""
        found = [objects.by_id(tx, blob) for blob in planned.files.values()]
        if any(each is None for each in found):
            raise NotFound("a file was deleted meanwhile; try again")
        return [each for each in found if each is not None]

    def _of_version(self, tx: Transaction, source: StoredObject, folder: str) -> ArtifactPlan | None:
        if source.kind != "model_version":
            return None
        version = self._open_version(tx, source)
        begin = f"{folder}/" if folder else ""
        files = {file.path: file.blob for file in version.files if file.path.startswith(begin)}
        inner = {path.removeprefix(begin): blob for path, blob in files.items()}
        return ArtifactPlan(inner, version.run, (version.id,), version.metrics)

    def _logged_to(self, tx: Transaction, source: StoredObject, folder: str) -> ArtifactPlan:
        run = source.id if source.kind == "run" else self._logged.run_of(tx, source)
        sources = () if source.kind == "run" else (source.id,)
        files, metrics = self._logged.files(tx, source, folder), self._logged.metrics(tx, source)
        return ArtifactPlan(files, run, sources, metrics)


def require_own_run(planned: ArtifactPlan, given: ObjectId | None) -> None:
    """Raise InvalidInput if the caller names another run than the one that the files come from."""
    if given is not None and given != planned.run:
        raise InvalidInput.at("run", given=given, allowed=f"the run that made them: {planned.run}")


def _require_files(files: Mapping[str, ObjectId], source: StoredObject, folder: str) -> None:
    if not files:
        raise NotFound(f"{source.kind} {source.name} has no files in {folder or 'its top folder'!r}")
    if len(files) > MOST_FILES:
        raise InvalidInput.at("folder", given=f"{len(files)} files", allowed=f"at most {MOST_FILES} files")
    faults = []
    for path in files:
        try:
            _path.validate_python(path)
        except ValidationError as error:
            faults.append(Fault(where="folder", given=path, allowed=error.errors()[0]["msg"]))
    if faults:
        raise InvalidInput(f"{len(faults)} files cannot be part of a model version", faults=faults[:50])


# ------------------------------------------------------------------------------- what MLflow says of a model


@dataclass(frozen=True)
class MlflowFacts:
    """What MLflow wrote beside a model."""

    flavours: Sequence[str] = ()
    packages: tuple[PackagePin, ...] = ()


def read_mlflow_facts(
    blobs: Sequence[Blob], paths: Sequence[str], source: ModelBlobSource, parsers: ParserPool, *, owner: str
) -> MlflowFacts | None:
    """Return what MLmodel and requirements.txt say; none where there is no MLmodel."""
    by_path = dict(zip(paths, blobs, strict=True))
    if MLMODEL not in by_path:
        return None
    wanted = [by_path[name] for name in (MLMODEL, REQUIREMENTS) if name in by_path]
    parsed = parsers.parse(
        MLFLOW_MODEL, [*map(partial(byte_source, source), wanted)], {"where": MLMODEL}, owner=owner
    )
    pins = [{"name": name, "version": version} for name, version in parsed.facts.get("packages", ())]
    try:
        packages = _pins.validate_python(pins)
    except ValidationError:
        packages = ()
    return MlflowFacts([str(name) for name in parsed.facts.get("flavours", ())], packages)


def version_format(files: Sequence[ModelFile], described: MlflowFacts | None) -> FileFormat:
    """Return the format of a version. Without a model that is served, it is one that MLflow's client loads."""
    found = [file.format for file in files]
    if described is None or FileFormat.PICKLE in found:
        return model_format(found)
    served = [each for each in found if each.is_model and each is not FileFormat.PYTHON]
    return model_format(served) if served else FileFormat.MLFLOW


def with_safe_option(error: InvalidInput, described: MlflowFacts | None) -> FalajError:
    """Return the refusal of files, with what MLflow's client has instead for this flavour."""
    option = safe_option(described.flavours) if described is not None else None
    if option is None or not any("pickle" in (fault.given or "") for fault in error.faults):
        return error
    faults = [
        fault.model_copy(update={"fix": option}) if "pickle" in (fault.given or "") else fault
        for fault in error.faults
    ]
    return InvalidInput(error.message, faults=faults)
