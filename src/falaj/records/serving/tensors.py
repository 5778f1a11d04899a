"""Tensors of the Open Inference Protocol, and the models that take and return them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from falaj.records.names import Name, Reference
from falaj.records.record import Record

DYNAMIC = -1
"""A dimension that each request chooses."""


class Datatype(StrEnum):
    """The tensor types of the Open Inference Protocol that we serve."""

    BOOL = "BOOL"
    UINT8 = "UINT8"
    UINT16 = "UINT16"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    FP16 = "FP16"
    BF16 = "BF16"
    FP32 = "FP32"
    FP64 = "FP64"
    BYTES = "BYTES"


class Tensor(Record):
    """An input or output of a model; -1 in `shape` is a dimension that each request chooses."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} ({self.datatype} {list(self.shape)})"


class ServedModel(Record):
    """One version of a model as it is served: its inputs and outputs, in the model's order."""

    name: Reference
    version: Name
    platform: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


TensorName = Annotated[str, Field(min_length=1, max_length=256)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
