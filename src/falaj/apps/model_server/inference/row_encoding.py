"""JSON responses of one row each, encoded for a whole batch: the numbers at once, the text around them never again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from falaj.apps.model_server.inference.protocol import OutputChoice, OutputSelection, ResponseEncoder
from falaj.records.serving.tensors import DYNAMIC, Datatype, ServedModel
from falaj.serving.tensors import NUMPY

Array = npt.NDArray[Any]

MARK = "00000000-prediction"
"""Stands for the id of a prediction while the text around it is found."""
DATA, END = b'"data":[', b"]}]}"
ALL: OutputSelection = (OutputChoice(0, False),)
ALL_BINARY: OutputSelection = (OutputChoice(0, True),)
MAX_ROW_VALUES = 64
"""Values of a row; the text of longer ones costs far more than what is around it."""


class RowText(NamedTuple):
    """The text of a response around the id of the prediction and the values of its row."""

    start: bytes
    middle: bytes
    end: bytes


class RowEncoder:
    """Encodes responses of one row of a model with one output of numbers. Others are None: encode them one by one."""

    def __init__(self, encoder: ResponseEncoder, width: int, datatype: Datatype) -> None:
        self._encoder = encoder
        self._width = width
        self._sample = np.zeros((1, width), NUMPY[datatype])
        self.named = _around(encoder, self._sample, MARK)
        self.nameless = _around(encoder, self._sample, "")

    def texts(self, outputs: Sequence[Array]) -> list[bytes] | None:
        """Return the numbers of each row as text, separated by commas; None if they need more than that."""
        (array,) = outputs
        if array.ndim != 2 or array.shape[1] != self._width:
            return None
        body, _ = self._encoder.encode("", "", outputs, ALL)
        text = body[body.rindex(DATA) + len(DATA) : -len(END)]
        if b"null" in text:
            return None
        numbers, width = text.split(b","), self._width
        if width == 1:
            return numbers
        return [b",".join(numbers[at : at + width]) for at in range(0, len(numbers), width)]

    def body(self, prediction: str, text: bytes) -> bytes:
        """Return the body of a response with one row."""
        start, middle, end = self.named if prediction else self.nameless
        return b"".join((start, prediction.encode(), middle, text, end))

    def binary_text(self, *, is_named: bool) -> RowText:
        """Return the JSON before the bytes of a row."""
        mark = MARK if is_named else ""
        body, size = self._encoder.encode("", mark, [self._sample], ALL_BINARY)
        start, _, middle = body[:size].partition(mark.encode()) if mark else (body[:size], b"", b"")
        return RowText(start, middle, b"")


def row_encoder(encoder: ResponseEncoder, model: ServedModel) -> RowEncoder | None:
    """Return the encoder of single rows of `model`, if it has one output of a few numbers a row."""
    if len(model.outputs) != 1:
        return None
    shape, datatype = model.outputs[0].shape, model.outputs[0].datatype
    if len(shape) != 2 or shape[1] == DYNAMIC or not 0 < shape[1] <= MAX_ROW_VALUES:
        return None
    return None if datatype is Datatype.BYTES else RowEncoder(encoder, shape[1], datatype)


def _around(encoder: ResponseEncoder, sample: Array, mark: str) -> RowText:
    """Return the text around the id, which may be empty, and the numbers."""
    body, _ = encoder.encode("", mark, [sample], ALL)
    start, _, rest = body.partition(mark.encode()) if mark else (b"", b"", body)
    return RowText(start, rest[: rest.rindex(DATA) + len(DATA)], END)
