"""Ensembles: a graph of model versions and feature lookups that is registered and served as one model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from falaj.records.names import ObjectId, Reference, TextRule
from falaj.records.record import Record
from falaj.records.registry import Dtype, FileFormat, TensorSpec
from falaj.records.serving.lookups import Lookup
from falaj.records.serving.tensors import TensorName

REQUEST = "request"
"""Stands for the inputs of the ensemble where the name of a step may stand."""
DOCUMENT = "ensemble.json"
"""The one file of a version that is an ensemble."""
LOOKED_UP = "features"
"""The output of a lookup: a row of numbers."""
MOST_STEPS = 32
MOST_SOURCES = 256

StepName = Annotated[
    str,
    TextRule(
        r"[a-z]([a-z0-9_-]*[a-z0-9])?",
        "the name of a step is a-z, 0-9, '_' and '-', starting with a letter, like clean",
        limit=64,
    ),
]
TensorSource = Annotated[
    str,
    TextRule(
        r"[a-z][a-z0-9_-]*\.[^\x00-\x1f]{1,256}",
        "a source is an input of the ensemble, like request.amount, or an output of a step, like clean.scaled",
        limit=321,
    ),
]
Sources = TensorSource | Annotated[tuple[TensorSource, ...], Field(min_length=1, max_length=MOST_SOURCES)]
"""One tensor as it is, or several as the columns of one."""
Connections = Annotated[dict[TensorName, Sources], Field(max_length=MOST_SOURCES)]


class TensorPlace(NamedTuple):
    """A tensor by the step that makes it, or REQUEST, and its name there."""

    step: str
    tensor: str

    def __str__(self) -> str:
        return f"{self.step}.{self.tensor}"


def places_of(sources: str | tuple[str, ...]) -> list[TensorPlace]:
    """Return the tensors that an input is made from."""
    given = (sources,) if isinstance(sources, str) else sources
    return [TensorPlace(*source.split(".", 1)) for source in given]


class EnsembleStep(Record):
    """A model version, or a feature lookup, and where each of its inputs comes from.

    The output of a lookup is `features`: the lookup's features as columns of one tensor of the type `dtype`.
    """

    name: StepName
    model: Reference | None = None
    lookup: Lookup | None = None
    dtype: Literal["float32", "float64"] = "float32"
    inputs: Connections = {}

    @model_validator(mode="after")
    def _is_one_thing(self) -> Self:
        if (self.model is None) == (self.lookup is None):
            raise ValueError(f"step {self.name} needs either a model or a lookup")
        if self.model is not None and "dtype" in self.model_fields_set and self.dtype != "float32":
            raise ValueError(f"step {self.name} is a model, whose types are its own: dtype is of lookups")
        if self.name == REQUEST:
            raise ValueError(f"no step may be called {REQUEST}: that means the inputs of the ensemble")
        return self

    def uses(self) -> set[str]:
        """Return the steps that it takes outputs of."""
        return {place.step for place in tensor_places(self.inputs)} - {REQUEST}


class Ensemble(Record):
    """Steps that run one after another, or beside each other, as far as their inputs permit.

    `outputs` are those of the ensemble, by name. Its inputs are what its steps take from `request`; their types follow
    from the steps, unless `inputs` declares them.
    """

    steps: Annotated[tuple[EnsembleStep, ...], Field(min_length=1, max_length=MOST_STEPS)]
    outputs: Annotated[dict[TensorName, Sources], Field(min_length=1, max_length=MOST_SOURCES)]
    inputs: Annotated[tuple[TensorSpec, ...], Field(max_length=MOST_SOURCES)] = ()

    def levels(self) -> list[list[EnsembleStep]]:
        """Return the steps in the order in which they run; those of one level need nothing of each other.

        Steps that need each other in a circle are left out.
        """
        left, done, found = list(self.steps), set[str](), list[list[EnsembleStep]]()
        while left:
            level = [step for step in left if step.uses() <= done]
            if not level:
                break
            found.append(level)
            done |= {step.name for step in level}
            left = [step for step in left if step.name not in done]
        return found

    def requested(self) -> list[str]:
        """Return the inputs of the ensemble: the declared ones, and what else steps take, in their order."""
        taken = [
            place.tensor
            for step in self.steps
            for place in tensor_places(step.inputs)
            if place.step == REQUEST
        ]
        passed = [place.tensor for place in tensor_places(self.outputs) if place.step == REQUEST]
        return list(dict.fromkeys([*(spec.name for spec in self.inputs), *taken, *passed]))


class StepInput(Record):
    """An input of a step: the types and the shape that it takes. A `column` is one value per row, with or without a
    second dimension of 1; one that is `optional` may be left out."""

    name: TensorName
    dtypes: Annotated[tuple[Dtype, ...], Field(min_length=1)]
    """The first one is what it gets from an input of the ensemble that nobody has declared."""
    shape: tuple[int, ...]
    column: bool = False
    optional: bool = False
    features: tuple[str, ...] = ()


class PreparedLookup(Record):
    """A lookup whose views, types and imputed values are pinned, and the inputs that it takes."""

    lookup: Lookup
    takes: tuple[StepInput, ...]


class ComposedStep(EnsembleStep):
    """A step as it is registered: the id of its version, or the views of its lookup, and its tensors."""

    version: ObjectId | None = None
    format: FileFormat | None = None
    takes: tuple[TensorSpec, ...]
    gives: tuple[TensorSpec, ...]

    @property
    def title(self) -> str:
        return f"step {self.name} ({self.model})" if self.model is not None else f"step {self.name}"


class ComposedEnsemble(Ensemble):
    """An ensemble as it is registered: what it refers to is pinned, and every tensor has a type."""

    steps: Annotated[tuple[ComposedStep, ...], Field(min_length=1, max_length=MOST_STEPS)]
    gives: tuple[TensorSpec, ...]

    def composed_levels(self) -> list[list[ComposedStep]]:
        """Return the steps in the order in which they run, as `levels` does."""
        known = {step.name: step for step in self.steps}
        return [[known[step.name] for step in level] for level in self.levels()]


def tensor_places(connections: Mapping[str, Any]) -> Iterator[TensorPlace]:
    """Return all tensors that some inputs, or the outputs, are made from."""
    for sources in connections.values():
        yield from places_of(sources)
