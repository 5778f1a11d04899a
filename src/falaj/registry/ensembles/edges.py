"""The types of an ensemble: every connection is checked, and the inputs that nobody declared get theirs from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from falaj.errors import Fault, InvalidInput, shorten
from falaj.records.registry import Dtype, TensorSpec
from falaj.records.serving.ensembles import REQUEST, Ensemble, StepInput, TensorPlace, places_of

ANY = -1
MAX_FAULTS = 50


@dataclass(frozen=True)
class StepSignature:
    """What a step takes and gives; `title` is what errors call it."""

    title: str
    takes: tuple[StepInput, ...]
    gives: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class EnsembleSignature:
    """The inputs and outputs of an ensemble."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def signature_of(ensemble: Ensemble, steps: Mapping[str, StepSignature]) -> EnsembleSignature:
    """Return the signature of an ensemble. Raise InvalidInput, with all faults, unless every connection fits."""
    faults = [fault for step in steps.values() for fault in _row_faults(step)]
    faults += _declaration_faults(ensemble.inputs)
    inputs = _inputs(ensemble, steps, faults)
    known = {TensorPlace(REQUEST, spec.name): spec for spec in inputs}
    known |= {TensorPlace(name, spec.name): spec for name, step in steps.items() for spec in step.gives}
    for step in ensemble.steps:
        faults += _step_faults(steps[step.name], step.inputs, known)
    outputs = []
    for name, sources in ensemble.outputs.items():
        made = _made_of(sources, known, f"output {name}", faults)
        if made is not None:
            outputs.append(made.model_copy(update={"name": name}))
    if faults:
        raise InvalidInput("the ensemble is not valid", faults=faults[:MAX_FAULTS])
    return EnsembleSignature(inputs, tuple(outputs))


def _row_faults(step: StepSignature) -> list[Fault]:
    """Return a fault for each tensor of a model whose first dimension is not the rows of a batch."""
    tensors = [("input", each.name, each.shape) for each in step.takes]
    tensors += [("output", each.name, each.shape) for each in step.gives]
    return [
        Fault(
            where=f"{step.title}: {kind} {shorten(name)}",
            given=f"the shape {list(shape)}",
            allowed="-1 as its first dimension: any number of rows",
            fix="export the model for batches of any size, and register that",
        )
        for kind, name, shape in tensors
        if shape[:1] != (ANY,)
    ]


def _declaration_faults(declared: Sequence[TensorSpec]) -> list[Fault]:
    return [
        Fault(
            where=f"input {shorten(spec.name)}",
            given=f"the shape {list(spec.shape)}",
            allowed="-1 as its first dimension: any number of rows",
            fix=f'{{name = "{spec.name}", dtype = "{spec.dtype}", shape = [-1]}}',
        )
        for spec in declared
        if spec.shape[:1] != (ANY,)
    ]


def _inputs(
    ensemble: Ensemble, steps: Mapping[str, StepSignature], faults: list[Fault]
) -> tuple[TensorSpec, ...]:
    """Return the inputs of the ensemble: as declared, else as the steps take them."""
    declared = {spec.name: spec for spec in ensemble.inputs}
    found = []
    for name in ensemble.requested():
        spec = declared.get(name) or _derived(name, _direct_uses(ensemble, steps, name))
        if spec is not None:
            found.append(spec)
        else:
            faults.append(
                Fault(
                    where=f"input {shorten(name)}",
                    given="no type: no step takes it as it is",
                    allowed="a declaration in inputs",
                    fix=f'inputs = [{{name = "{name}", dtype = "float32", shape = [-1, 1]}}]',
                )
            )
    return tuple(found)


def _direct_uses(ensemble: Ensemble, steps: Mapping[str, StepSignature], name: str) -> list[StepInput]:
    """Return the inputs of steps that get an input of the ensemble as it is."""
    source = str(TensorPlace(REQUEST, name))
    return [
        taken
        for step in ensemble.steps
        for taken in steps[step.name].takes
        if step.inputs.get(taken.name) == source
    ]


def _derived(name: str, uses: Sequence[StepInput]) -> TensorSpec | None:
    """Return what several steps take together; what they do not agree on is a fault of the connection."""
    if not uses:
        return None
    strict = [use for use in uses if not use.column] or list(uses)
    shape = list(strict[0].shape)
    for use in strict[1:]:
        if len(use.shape) == len(shape):
            shape = [other if size == ANY else size for size, other in zip(shape, use.shape, strict=True)]
    columns = next((use.features for use in strict if use.features), ())
    return TensorSpec(name=name, dtype=strict[0].dtypes[0], shape=tuple(shape), features=columns)


def _step_faults(
    step: StepSignature,
    connections: Mapping[str, str | tuple[str, ...]],
    known: Mapping[TensorPlace, TensorSpec],
) -> list[Fault]:
    faults: list[Fault] = []
    wanted = {taken.name: taken for taken in step.takes}
    for name, sources in connections.items():
        where = f"{step.title}: input {shorten(name)}"
        if name not in wanted:
            allowed = f"the inputs {', '.join(wanted) or '(none)'}"
            faults.append(Fault(where=where, given="an unknown name", allowed=allowed))
            continue
        made = _made_of(sources, known, where, faults)
        if made is not None and not _fits(made, wanted[name]):
            shown = sources if isinstance(sources, str) else f"[{', '.join(sources)}]"
            faults.append(
                Fault(
                    where=where,
                    given=f"{shorten(shown)}: {made.dtype} {list(made.shape)}",
                    allowed=_allowed(wanted[name]),
                    fix="a Python step between them can convert it",
                )
            )
    faults += [
        Fault(where=f"{step.title}: input {shorten(name)}", given="nothing", allowed=_allowed(taken))
        for name, taken in wanted.items()
        if name not in connections and not taken.optional
    ]
    return faults


def _made_of(
    sources: str | tuple[str, ...], known: Mapping[TensorPlace, TensorSpec], where: str, faults: list[Fault]
) -> TensorSpec | None:
    """Return the tensor that the sources make: one as it is, or several as columns. None with faults."""
    places = places_of(sources)
    unknown = [place for place in places if place not in known]
    if unknown:
        # An input of the ensemble without a type has its fault already.
        faults += [_unknown_tensor(place, known, where) for place in unknown if place.step != REQUEST]
        return None
    specs = [known[place] for place in places]
    if isinstance(sources, str):
        return specs[0]
    dtypes = {spec.dtype for spec in specs}
    wide = [place for place, spec in zip(places, specs, strict=True) if len(spec.shape) > 2]
    if len(dtypes) > 1 or wide:
        shown = ", ".join(
            f"{place} {spec.dtype} {list(spec.shape)}" for place, spec in zip(places, specs, strict=True)
        )
        allowed = "tensors of one type, each with one or two dimensions"
        faults.append(Fault(where=where, given=f"columns of {shorten(shown, limit=200)}", allowed=allowed))
        return None
    widths = [spec.shape[1] if len(spec.shape) == 2 else 1 for spec in specs]
    width = ANY if ANY in widths else sum(widths)
    return TensorSpec(name="columns", dtype=dtypes.pop(), shape=(ANY, width))


def _unknown_tensor(place: TensorPlace, known: Mapping[TensorPlace, TensorSpec], where: str) -> Fault:
    outputs = ", ".join(each.tensor for each in known if each.step == place.step)
    return Fault(where=where, given=shorten(str(place)), allowed=f"outputs of {place.step}: {outputs}")


def _fits(made: TensorSpec, wanted: StepInput) -> bool:
    if made.dtype not in wanted.dtypes:
        return False
    if wanted.column:
        return made.shape in ((ANY,), (ANY, 1))
    return len(made.shape) == len(wanted.shape) and all(
        ANY in pair or pair[0] == pair[1] for pair in zip(made.shape, wanted.shape, strict=True)
    )


def _allowed(wanted: StepInput) -> str:
    kinds: tuple[Dtype, ...] = wanted.dtypes
    return f"{' or '.join(kinds)} {list(wanted.shape)}{' or [-1, 1]' if wanted.column else ''}"
