"""Ensembles in the model server: each step is opened as a version of its own, and lookups read the online store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from falaj.apps.model_server.inference.feature_lookup import join_values
from falaj.errors import Damaged, FalajError, InvalidInput
from falaj.records.serving.endpoints import ServedFile
from falaj.records.serving.ensembles import ComposedEnsemble, ComposedStep
from falaj.records.serving.lookups import Lookup
from falaj.records.serving.tensors import ServedModel
from falaj.serving.dependencies import FeatureReader
from falaj.serving.lookups.joins import LookupMeter, build_join
from falaj.serving.runtime.engine import LONGEST_S, ModelEngine
from falaj.serving.runtime.ensembles.engine import EnsembleEngine, step_file
from falaj.serving.runtime.formats import declared_tensors
from falaj.serving.runtime.probe import RunCost

Array = npt.NDArray[Any]

LOOKUP_PLATFORM = "feature_lookup"
LOOKUP_COST = RunCost(seconds=0.00005, rows=4096, inline_rows=0, more_seconds=0.00002)
"""About what the online store of this machine takes; a lookup treats each row alone."""


def open_ensemble(
    file: ServedFile, content: bytes, *, load: Callable[[ServedFile], ModelEngine], features: FeatureReader
) -> EnsembleEngine:
    """Open all steps of an ensemble from its verified document. Raise the error of a step, with its name."""
    if file.settings.engine == "triton":
        raise InvalidInput(
            f"{file.model}@{file.version} is an ensemble, which Triton does not have; "
            "falaj endpoints configure NAME --engine auto"
        )
    try:
        composed = ComposedEnsemble.model_validate_json(content)
    except ValidationError as error:
        raise Damaged(f"the document of {file.model}@{file.version} is not an ensemble: {error}") from None
    opened: dict[str, ModelEngine] = {}
    with ExitStack() as failed:
        for step in composed.steps:
            opened[step.name] = engine = _opened_step(file, step, load, features)
            failed.callback(engine.close)
        made = EnsembleEngine(file, composed, opened)
        failed.pop_all()
    return made


def _opened_step(
    file: ServedFile, step: ComposedStep, load: Callable[[ServedFile], ModelEngine], features: FeatureReader
) -> ModelEngine:
    try:
        if step.lookup is not None:
            return LookupEngine(step, step.lookup, features)
        return load(step_file(file, step))
    except FalajError as error:
        raise error.within(step.title) from None


class LookupEngine:
    """A feature lookup as a step: columns of earlier steps in, a row of features out."""

    in_process = True

    def __init__(self, step: ComposedStep, lookup: Lookup, features: FeatureReader) -> None:
        self.model = ServedModel(
            name=step.name,
            version="1",
            platform=LOOKUP_PLATFORM,
            inputs=declared_tensors(step.takes),
            outputs=declared_tensors(step.gives),
        )
        self.cost = LOOKUP_COST
        self.meter = LookupMeter()
        self._features = features
        self._join = build_join(lookup, lookup.features, version=step.name)

    def run(self, inputs: Sequence[Array], *, limit_s: float = LONGEST_S) -> list[Array]:
        """Return the features of each row, by the lookup's rules for what is missing."""
        pairs = zip(self.model.inputs, inputs, strict=True)
        values = {tensor.name: _column(tensor.name, array) for tensor, array in pairs}
        (output,) = self.model.outputs
        return [join_values(values, self._join, output, self._features, self.meter).block]

    def close(self) -> None:
        return None


def _column(name: str, array: Array) -> Array:
    """Return one value per row. Raise InvalidInput for values that are neither texts nor numbers."""
    column = array.reshape(-1)
    if column.dtype == np.object_ and any(not isinstance(value, str) for value in column.tolist()):
        raise InvalidInput(f"its input {name} holds bytes that are not UTF-8; allowed texts or numbers")
    return column


def lookup_meters(engine: EnsembleEngine) -> Mapping[str, LookupMeter]:
    """Return what the lookups of an ensemble missed, by step."""
    return {name: each.meter for name, each in engine.engines.items() if isinstance(each, LookupEngine)}
