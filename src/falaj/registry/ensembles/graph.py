"""The graph of an ensemble: names that are there once, steps that exist, are needed, and do not need each other."""

from __future__ import annotations

from collections.abc import Iterator

from falaj.errors import Fault, InvalidInput, shorten
from falaj.records.names import repeated_names
from falaj.records.serving.ensembles import REQUEST, Ensemble, tensor_places

MAX_FAULTS = 50


def require_graph(ensemble: Ensemble) -> None:
    """Raise InvalidInput, with all faults, unless the steps can run in an order, and each of them is needed."""
    faults = [*_name_faults(ensemble), *_source_faults(ensemble)]
    if not faults:
        faults = [*_cycle_faults(ensemble)] or [*_unused_faults(ensemble)]
    if faults:
        raise InvalidInput("the ensemble is not valid", faults=faults[:MAX_FAULTS])


def _name_faults(ensemble: Ensemble) -> Iterator[Fault]:
    for name in sorted(set(repeated_names(step.name for step in ensemble.steps))):
        yield Fault(where=f"step {name}", given="a name that is there twice", allowed="each name once")
    for name in sorted(set(repeated_names(spec.name for spec in ensemble.inputs))):
        yield Fault(
            where=f"input {shorten(name)}",
            given="a name that is there twice",
            allowed="each name once, whether in capitals or not",
        )


def _source_faults(ensemble: Ensemble) -> Iterator[Fault]:
    names = [step.name for step in ensemble.steps]
    connected = [(f"step {step.name}", step.inputs) for step in ensemble.steps]
    used = set()
    for where, connections in [*connected, ("outputs", ensemble.outputs)]:
        for place in tensor_places(connections):
            used |= {place.tensor} if place.step == REQUEST else set()
            if place.step not in (REQUEST, *names):
                allowed = f"request, or one of the steps {', '.join(names)}"
                yield Fault(where=where, given=f"{shorten(str(place))}, of an unknown step", allowed=allowed)
    for spec in ensemble.inputs:
        if spec.name not in used:
            allowed = f"an input that a step takes, as request.{spec.name}"
            yield Fault(where=f"input {shorten(spec.name)}", given="no use", allowed=allowed)


def _cycle_faults(ensemble: Ensemble) -> Iterator[Fault]:
    ordered = {step.name for level in ensemble.levels() for step in level}
    waiting = {step.name: step.uses() - ordered for step in ensemble.steps if step.name not in ordered}
    if not waiting:
        return
    path = [next(iter(waiting))]
    while path[-1] not in path[:-1]:
        path.append(min(waiting[path[-1]]))
    circle = path[path.index(path[-1]) :]
    yield Fault(
        where=f"step {circle[0]}",
        given=f"a cycle: {' needs '.join(circle)}",
        allowed="steps that need earlier steps only",
    )


def _unused_faults(ensemble: Ensemble) -> Iterator[Fault]:
    steps = {step.name: step for step in ensemble.steps}
    needed, left = set[str](), [place.step for place in tensor_places(ensemble.outputs)]
    while left:
        name = left.pop()
        if name != REQUEST and name not in needed:
            needed.add(name)
            left += steps[name].uses()
    for name in steps:
        if name not in needed:
            fix = "remove it, or name one of its outputs in outputs"
            yield Fault(where=f"step {name}", given="no use", allowed="a step that an output needs", fix=fix)
