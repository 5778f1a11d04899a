"""Resolve the steps of an ensemble, check what the caller may use and how it fits together, and pin it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from falaj.errors import Conflict, FalajError, InvalidInput, TooLarge
from falaj.governance import objects
from falaj.governance.blobs.contents import WrittenBlob
from falaj.governance.operations.call import Call
from falaj.governance.operations.gate import Gate
from falaj.ports.metadata import Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.names import DEFAULT_WORKSPACE, ObjectId
from falaj.records.registry import FileFormat, ModelFile, ModelVersion, TensorSpec
from falaj.records.serving.ensembles import (
    DOCUMENT,
    LOOKED_UP,
    ComposedEnsemble,
    ComposedStep,
    Ensemble,
    EnsembleStep,
    PreparedLookup,
    StepInput,
)
from falaj.records.serving.lookups import Lookup
from falaj.registry.ensembles.edges import StepSignature, signature_of
from falaj.registry.ensembles.graph import require_graph
from falaj.registry.exports.layout import ExportSubject, TreeFacts

STEP_FORMATS = (
    *(FileFormat.ONNX, FileFormat.TORCH_EXPORT, FileFormat.XGBOOST),
    *(FileFormat.LIGHTGBM, FileFormat.LITERT, FileFormat.PYTHON),
)
DOCUMENT_BYTES = 4 << 20
CLASSES = frozenset(
    {"multi:softprob", "multi:softmax", "multiclass", "multiclassova", "softmax", "ova", "ovr"}
)
PROBABILITY = frozenset({"binary:logistic", "reg:logistic", "binary", "cross_entropy", "xentropy"})
"""The objectives of tree models, by what their engines call the output."""


class LookupSource(Protocol):
    """The lookups of ensembles, by the service that serves them."""

    def views(self, call: Call, tx: Transaction, lookup: Lookup, *, workspace: str) -> list[StoredObject]:
        """Return the views of a lookup. Raise unless the caller may read them."""
        ...

    def prepare(self, call: Call, step: str, lookup: Lookup, *, workspace: str) -> PreparedLookup:
        """Return a lookup with all that it needs pinned. Reads tables: no transaction is open."""
        ...


@dataclass(frozen=True)
class PlannedEnsemble:
    """An ensemble that fits together, and the objects that it is made of, by step."""

    composed: ComposedEnsemble
    origins: dict[str, tuple[ObjectId, ...]]

    def content(self) -> bytes:
        """Return the file of the version. Raise TooLarge."""
        found = self.composed.model_dump_json(exclude_defaults=True, indent=1).encode()
        if len(found) > DOCUMENT_BYTES:
            raise TooLarge.at(
                "ensemble", given=f"{len(found)} bytes with its types", allowed=f"at most {DOCUMENT_BYTES}"
            )
        return found


@dataclass(frozen=True)
class EnsembleComposer:
    """Turns the description of an ensemble into what is registered."""

    gate: Gate
    version: Callable[[Transaction, StoredObject], ModelVersion]
    subject: Callable[[Call, StoredObject], ExportSubject]
    """Reads the tensors of a version from its file; no transaction is open."""
    lookups: LookupSource

    def plan(self, call: Call, ensemble: Ensemble, *, workspace: str) -> PlannedEnsemble:
        """Return the ensemble with its steps pinned. Raise InvalidInput, naming the step, if they do not fit."""
        require_graph(ensemble)
        with self.gate.database.read() as tx:
            found = {step.name: self._objects(call, tx, step, workspace) for step in ensemble.steps}
            names = {name: _reference(tx, own[0]) for name, own in found.items()}
        prepared, signatures = {}, {}
        for step in ensemble.steps:
            with within_step(step.name):
                made, signature = self._prepared(call, step, found[step.name], names[step.name], workspace)
            prepared[step.name], signatures[step.name] = made, signature
        whole = signature_of(ensemble, signatures)
        composed = ComposedEnsemble(
            steps=tuple(prepared[step.name] for step in ensemble.steps),
            inputs=whole.inputs,
            outputs=ensemble.outputs,
            gives=whole.outputs,
        )
        return PlannedEnsemble(
            composed, {name: tuple(each.id for each in own) for name, own in found.items()}
        )

    def origins(
        self, call: Call, tx: Transaction, ensemble: Ensemble, planned: PlannedEnsemble, *, workspace: str
    ) -> list[StoredObject]:
        """Return the objects that an ensemble is made of, each once, as they are now. Raise if they may not be used."""
        found: dict[ObjectId, StoredObject] = {}
        for step in ensemble.steps:
            own = self._objects(call, tx, step, workspace)
            if tuple(each.id for each in own) != planned.origins[step.name]:
                raise Conflict(f"step {step.name}: what it refers to has changed; try again")
            found |= {each.id: each for each in own}
        return list(found.values())

    def _objects(self, call: Call, tx: Transaction, step: EnsembleStep, workspace: str) -> list[StoredObject]:
        """Return the version of a step, or the views of its lookup. Raise unless the caller may read them."""
        with within_step(step.name):
            if step.lookup is not None:
                return self.lookups.views(call, tx, step.lookup, workspace=workspace)
            reference = str(step.model)
            found = objects.resolve(tx, reference, kind="model_version", workspace=workspace)
            self.gate.require(call, "models.read", found, tx=tx, reference=reference)
            return [found]

    def _prepared(
        self, call: Call, step: EnsembleStep, found: Sequence[StoredObject], name: str, workspace: str
    ) -> tuple[ComposedStep, StepSignature]:
        facts = {"name": step.name, "dtype": step.dtype, "inputs": step.inputs}
        if step.lookup is not None:
            lookup = self.lookups.prepare(call, step.name, step.lookup, workspace=workspace)
            columns = lookup.lookup.features
            made = TensorSpec(name=LOOKED_UP, dtype=step.dtype, shape=(-1, len(columns)), features=columns)
            signature = StepSignature(f"step {step.name}", lookup.takes, (made,))
            taken = [each for each in lookup.takes if each.name in step.inputs]
            return (
                ComposedStep(**facts, lookup=lookup.lookup, takes=_specs(taken), gives=(made,)),  # type: ignore[arg-type]
                signature,
            )
        with self.gate.database.read() as tx:
            version = self.version(tx, found[0])
        _require_step_format(version)
        takes, gives = _tensors(self.subject(call, found[0]))
        signature = StepSignature(
            f"step {step.name} ({name})",
            tuple(
                StepInput(name=each.name, dtypes=(each.dtype,), shape=each.shape, features=each.features)
                for each in takes
            ),
            gives,
        )
        pinned = {"model": name, "version": version.id, "format": version.format}
        return ComposedStep(**facts, **pinned, takes=takes, gives=gives), signature  # type: ignore[arg-type]


@contextmanager
def within_step(name: str) -> Iterator[None]:
    """Name the step in errors."""
    try:
        yield
    except FalajError as error:
        raise error.within(f"step {name}") from None


def document_file(written: WrittenBlob) -> ModelFile:
    """Return the one file of an ensemble's version."""
    return ModelFile(
        path=DOCUMENT,
        format=FileFormat.ENSEMBLE,
        blob=written.id,
        size_bytes=written.size_bytes,
        sha256=written.sha256,
    )


def _reference(tx: Transaction, found: StoredObject) -> str:
    """Return the name of a version as callers of another workspace would write it."""
    workspace = objects.by_id(tx, found.workspace)
    is_default = workspace is None or workspace.name == DEFAULT_WORKSPACE
    return found.name if is_default or workspace is None else f"{workspace.name}/{found.name}"


def _require_step_format(version: ModelVersion) -> None:
    if version.format is FileFormat.ENSEMBLE:
        raise InvalidInput.at(
            version.reference,
            given="an ensemble",
            allowed="a model: ensembles are not nested",
            fix=f"list its steps among yours: falaj models read {version.reference} {DOCUMENT}",
        )
    if version.format not in STEP_FORMATS:
        raise InvalidInput.at(
            version.reference, given=version.format.value, allowed=f"one of {', '.join(STEP_FORMATS)}"
        )


def _tensors(subject: ExportSubject) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return the inputs and outputs of a version: of an ONNX file, else as registered, else of trees."""
    version = subject.version
    takes, gives = version.inputs, version.outputs
    if version.format is FileFormat.ONNX:
        takes, gives = subject.inputs, subject.outputs
    elif subject.trees is not None:
        takes = takes or _tree_inputs(subject.trees)
        gives = gives or (_tree_output(subject.trees),)
    if not takes or not gives or not all(spec.shape for spec in (*takes, *gives)):
        raise InvalidInput.at(
            version.reference,
            given="a signature without names, types and shapes",
            allowed="inputs and outputs, which the file of this format does not tell",
            fix='register it with inputs=[{"name": "x", "dtype": "float32", "shape": [-1, 4]}] and outputs=…',
        )
    return takes, gives


def _tree_inputs(trees: TreeFacts) -> tuple[TensorSpec, ...]:
    if trees.features is None:
        return ()
    return (TensorSpec(name="features", dtype="float32", shape=(-1, trees.features)),)


def _tree_output(trees: TreeFacts) -> TensorSpec:
    """Return the output as the engines of tree models name it."""
    if trees.objective in CLASSES:
        return TensorSpec(name="probabilities", dtype="float32", shape=(-1, trees.classes))
    name = "probability" if trees.objective in PROBABILITY else "prediction"
    return TensorSpec(name=name, dtype="float32", shape=(-1, 1))


def _specs(taken: Sequence[StepInput]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name=each.name, dtype=each.dtypes[0], shape=each.shape) for each in taken)
