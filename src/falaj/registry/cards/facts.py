"""Gathers the facts of a version, as far as the reader may see them, and finds those that are missing."""

from __future__ import annotations

from collections.abc import Sequence

from falaj.governance import objects
from falaj.governance.operations.call import current_call
from falaj.governance.operations.gate import Gate
from falaj.ports.metadata import Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.models.cards import CardFacts, OriginObject
from falaj.records.models.gates import MetricMeasurement
from falaj.records.names import ObjectId
from falaj.records.registry import FileFormat, ModelVersion
from falaj.registry.dependencies import RunParams
from falaj.registry.gates import store as gate_store

SAME = (
    *("id", "format", "files", "inputs", "outputs", "example", "metrics", "licence", "hardware"),
    *("packages", "environment", "code", "label", "zone", "created_at", "key"),
)
"""The fields of a version that its card has as they are."""


class FactReader:
    """Reads the facts of versions for the caller of the running operation."""

    def __init__(self, gate: Gate, params: RunParams) -> None:
        self._gate = gate
        self._params = params

    def read(self, tx: Transaction, version: ModelVersion) -> CardFacts:
        """Return all that is known of `version`. Of what the caller may not see, the id alone is told."""
        run = self._seen(tx, version.run)
        may_see_run = run is not None and bool(run.name)
        return CardFacts(
            **{name: getattr(version, name) for name in SAME},
            version=version.reference,
            measurements=self._measurements(tx, version.id),
            training_set=self._seen(tx, version.training_set),
            run=run,
            params=dict(self._params(tx, run.id)) if run is not None and may_see_run else {},
            sources=tuple(self._origins(tx, version.sources)),
            author=objects.name_of(tx, version.author),
            text=version.card,
        )

    def _measurements(self, tx: Transaction, version: ObjectId) -> tuple[MetricMeasurement, ...]:
        """Return the measurements on sets that the caller may see."""
        found = gate_store.measurements_of(tx, version)
        stored = {ident: objects.ever(tx, ident) for ident in {each.on for each in found}}
        named = {
            ident: each.name for ident, each in stored.items() if each is not None and self._may_see(each)
        }
        return tuple(each.model_copy(update={"on": named[each.on]}) for each in found if each.on in named)

    def _seen(self, tx: Transaction, ident: ObjectId | None) -> OriginObject | None:
        return None if ident is None else self._origins(tx, [ident])[0]

    def _origins(self, tx: Transaction, idents: Sequence[ObjectId]) -> list[OriginObject]:
        stored = [objects.ever(tx, ident) for ident in idents]
        return [
            OriginObject(id=ident)
            if each is None or not self._may_see(each)
            else OriginObject(id=ident, name=each.name, kind=each.kind)
            for ident, each in zip(idents, stored, strict=True)
        ]

    def _may_see(self, found: StoredObject) -> bool:
        call = current_call()
        return self._gate.authorizer.sees(call.tx, call.caller, found)


def missing_facts(facts: CardFacts) -> tuple[str, ...]:
    """Return what a complete card has and this one lacks, each as the parameter of models.register that gives it."""
    needed: dict[str, object] = {
        "card": facts.text.strip(),
        "licence": facts.licence,
        "metrics": facts.metrics or facts.measurements,
        "training_set": facts.training_set or facts.sources,
        "run": facts.run,
        "inputs": facts.inputs,
        "outputs": facts.outputs,
        "packages": facts.packages,
        "hardware": facts.hardware,
    }
    if facts.format is FileFormat.SAFETENSORS:  # weights alone say nothing of the network
        needed["code"] = facts.code
    return tuple(name for name, given in needed.items() if not given)
