"""Feature lookups as steps of ensembles: their views, what they take from earlier steps, and what they pin."""

from __future__ import annotations

from falaj.errors import InvalidInput
from falaj.governance.operations.call import Call
from falaj.governance.operations.gate import Gate
from falaj.ports.metadata import Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.registry import Dtype
from falaj.records.serving.ensembles import PreparedLookup, StepInput
from falaj.records.serving.lookups import Lookup, VersionLookup
from falaj.records.serving.tensors import Datatype
from falaj.serving import validation
from falaj.serving.dependencies import LoadView, TrainingFacts
from falaj.serving.lookups.joins import FeatureJoin, build_join, imputed_columns, lookup_faults
from falaj.serving.lookups.versions import VersionLookups, resolve_needed, value_sources

WHOLE: tuple[Dtype, ...] = ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8")
NUMBERS: tuple[Dtype, ...] = ("float64", "float32", *WHOLE, "bool")


class StepLookups:
    """Resolves the lookups of ensembles. They have no training set: values are imputed from the views."""

    def __init__(self, gate: Gate, *, views: LoadView, training: TrainingFacts) -> None:
        self._gate = gate
        self._opened = views
        self._values = VersionLookups(gate, training)

    def views(self, call: Call, tx: Transaction, lookup: Lookup, *, workspace: str) -> list[StoredObject]:
        """Return the views of a lookup. Raise unless the caller may read them."""
        return self._resolve(call, tx, lookup, workspace)[1]

    def prepare(self, call: Call, step: str, lookup: Lookup, *, workspace: str) -> PreparedLookup:
        """Return a lookup with its views, types and imputed values. It reads tables: no transaction is open."""
        if not lookup.features:
            raise InvalidInput.at(
                "lookup.features", given="none", allowed="the columns of its output, in their order"
            )
        with self._gate.database.read() as tx:
            resolved, _ = self._resolve(call, tx, lookup, workspace)
            needed = resolve_needed(lookup.request_features, resolved, lookup.features, where="lookup")
            own = VersionLookup(version=step, request_features=needed)
            resolved = resolved.model_copy(update={"versions": (own,)})
            join = build_join(resolved, lookup.features, version=step)
            wanted = [name for name in imputed_columns(resolved, join) if name not in lookup.imputed]
            plan = {(step, name): value_sources(tx, resolved, name) for name in wanted}
        found = self._values.read(plan)
        own = own.model_copy(
            update={
                "imputed": {column: value.value for (_, column), value in found.items()},
                "source": ", ".join(dict.fromkeys(value.source for value in found.values())),
            }
        )
        resolved = resolved.model_copy(update={"versions": (own,)})
        faults = lookup_faults(resolved, lookup.features, version=step, where="lookup")
        if faults:
            raise InvalidInput("the lookup is not valid", faults=faults)
        return PreparedLookup(lookup=resolved, takes=_inputs(resolved, join))

    def _resolve(
        self, call: Call, tx: Transaction, lookup: Lookup, workspace: str
    ) -> tuple[Lookup, list[StoredObject]]:
        return validation.resolve_lookup(
            self._gate, call, tx, lookup, workspace=workspace, opened=self._opened
        )


def _inputs(lookup: Lookup, join: FeatureJoin) -> tuple[StepInput, ...]:
    keys = {key: kind for view in lookup.views for key, kind in zip(view.keys, view.key_types, strict=True)}
    return tuple(
        StepInput(
            name=name,
            dtypes=_key_types(keys[name]) if name in keys else _value_types(join.datatype_of(name)),
            shape=(-1,),
            column=True,
            optional=name in join.optional,
        )
        for name in join.inputs
    )


def _key_types(kind: Datatype) -> tuple[Dtype, ...]:
    """Return the types of a key, as in requests of an endpoint: texts and whole numbers, the view's own first."""
    return (*WHOLE, "string") if kind is Datatype.INT64 else ("string", *WHOLE)


def _value_types(kind: Datatype) -> tuple[Dtype, ...]:
    if kind is Datatype.BYTES:
        return ("string", "int64")
    first: Dtype = {Datatype.INT64: "int64", Datatype.BOOL: "bool"}.get(kind, "float64")  # type: ignore[assignment]
    return (first, *(each for each in NUMBERS if each != first))
