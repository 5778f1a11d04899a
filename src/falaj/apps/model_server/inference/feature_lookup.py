"""Feature lookup: assemble the model's input from views by key and from the other inputs of the request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from falaj.apps.model_server.inference.protocol import InputTensor, read_values
from falaj.errors import Fault, shorten
from falaj.records.serving import Datatype, ServedModel, Tensor
from falaj.serving.dependencies import FeatureReader
from falaj.serving.lookups import FeatureJoin, ViewColumns
from falaj.serving.signatures import invalid_request
from falaj.serving.tensors import NUMPY

Array = npt.NDArray[Any]

FLOATS = frozenset({Datatype.FP16, Datatype.FP32, Datatype.FP64})


def has_model_input(given: Sequence[InputTensor], model: ServedModel) -> bool:
    """Return whether a request contains the model's input itself, so that no lookup is needed."""
    return len(given) == 1 and given[0].name == model.inputs[0].name


def join_rows(
    given: Sequence[InputTensor], join: FeatureJoin, tensor: Tensor, features: FeatureReader
) -> Array:
    """Return the model's input with a row per value of the request's inputs. Raise InvalidInput with all faults."""
    values = _read(given, join)
    rows = len(next(iter(values.values())))
    block: Array = np.full((rows, join.width), join.missing, np.float64)
    for part in join.views:
        _fill(block, part, features, _keys(part, values))
    for name, column in join.passed:
        block[:, column] = values[name]
    return block.astype(NUMPY[tensor.datatype])


def _fill(block: Array, part: ViewColumns, features: FeatureReader, keys: Sequence[str]) -> None:
    """Fill in the features of each key; missing values keep the default of the block."""
    found = features.read(part.view, keys)
    known = {name: place for place, name in enumerate(found.features)}
    places = [(known.get(name), column) for name, column in zip(part.features, part.columns, strict=True)]
    for number, row in enumerate(found.rows):
        values = row.values
        for place, column in places:
            value = None if place is None else values[place]
            if value is not None:
                block[number, column] = value


def _read(given: Sequence[InputTensor], join: FeatureJoin) -> Mapping[str, Array]:
    wanted, keys = join.inputs, {key for part in join.views for key in part.keys}
    values: dict[str, Array] = {}
    faults: list[Fault] = []
    for tensor in given:
        where = f"input '{shorten(tensor.name)}'"
        if tensor.name not in wanted or tensor.name in values:
            allowed = f"each of the inputs {', '.join(wanted)} once"
            faults.append(Fault(where=where, given="an unknown or duplicate name", allowed=allowed))
            continue
        try:
            values[tensor.name] = _values(tensor, is_key=tensor.name in keys)
        except (ValueError, OverflowError) as error:
            kind = "text or whole numbers" if tensor.name in keys else "numbers"
            faults.append(Fault(where=where, given=shorten(str(error)), allowed=f"{kind}, one per row"))
    named = {tensor.name for tensor in given}
    faults += [
        Fault(where=f"input '{name}'", given="nothing", allowed="a key" if name in keys else "a feature")
        for name in wanted
        if name not in named
    ]
    if not faults and len({len(array) for array in values.values()}) > 1:
        shown = ", ".join(f"{name} {len(array)}" for name, array in values.items())
        faults.append(
            Fault(where="inputs", given=f"rows: {shown}", allowed="the same number of rows in each")
        )
    if faults:
        raise invalid_request(faults)
    return values


def _values(tensor: InputTensor, *, is_key: bool) -> Array:
    """Return the values of an input, one per row. Raise ValueError if its type or shape is invalid."""
    datatype = Datatype(tensor.datatype)
    if is_key and (datatype in FLOATS or datatype is Datatype.BOOL):
        raise ValueError(f"datatype {datatype}")
    if not is_key and datatype is Datatype.BYTES:
        raise ValueError("datatype BYTES")
    count = prod(tensor.shape)
    if not count or tensor.shape[0] != count:
        raise ValueError(f"shape {tensor.shape}")
    return read_values(tensor, datatype, count)


def _keys(part: ViewColumns, values: Mapping[str, Array]) -> list[str]:
    """Return keys in the format of the online store: parts joined by '|' and escaped by a backslash."""
    if len(part.keys) == 1:
        return [str(value) for value in values[part.keys[0]].tolist()]
    columns = [[_escaped(value) for value in values[key].tolist()] for key in part.keys]
    return ["|".join(parts) for parts in zip(*columns, strict=True)]


def _escaped(value: object) -> str:
    return str(value).replace("\\", "\\\\").replace("|", "\\|")
