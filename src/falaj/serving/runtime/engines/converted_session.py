"""Sessions of models whose tensors NumPy cannot hold as they are: bfloat16, and bytes that are not text."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from falaj.errors import InvalidInput
from falaj.serving.tensors import bfloat16_bits, from_bfloat16_bits

Array = npt.NDArray[Any]

BFLOAT16, STRING = "tensor(bfloat16)", "tensor(string)"
ONNX_BFLOAT16 = 16
"""The number of the type in ONNX."""


class RunSession(Protocol):
    """A session as the engine uses it."""

    def run(self, names: None, feed: Mapping[str, Array], options: ort.RunOptions) -> list[Array]: ...


def converting(session: ort.InferenceSession) -> RunSession:
    """Return the session, with conversions where its model needs some."""
    types = {node.type for node in (*session.get_inputs(), *session.get_outputs())}
    if BFLOAT16 in types:
        if STRING in types:
            raise InvalidInput("a model cannot have tensors of bfloat16 and of text together")
        return Bfloat16Session(session)
    return TextSession(session) if STRING in {node.type for node in session.get_inputs()} else session


class Bfloat16Session:
    """Passes bfloat16 tensors, which are float32 here, by their bits."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self._inputs = {node.name for node in session.get_inputs() if node.type == BFLOAT16}
        self._outputs = [node.type == BFLOAT16 for node in session.get_outputs()]

    def run(self, names: None, feed: Mapping[str, Array], options: ort.RunOptions) -> list[Array]:
        values = {name: self._value(name, array) for name, array in feed.items()}
        outputs: Sequence[ort.OrtValue] = self._session.run_with_ort_values(names, values, options)
        return [
            _floats(value) if is_bfloat16 else value.numpy()
            for value, is_bfloat16 in zip(outputs, self._outputs, strict=True)
        ]

    def _value(self, name: str, array: Array) -> ort.OrtValue:
        if name not in self._inputs:
            return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
        bits = np.ascontiguousarray(bfloat16_bits(array))
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, ONNX_BFLOAT16)


class TextSession:
    """Passes text as text, and tensors with other bytes as they are: then all values must have the same length."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session

    def run(self, names: None, feed: Mapping[str, Array], options: ort.RunOptions) -> list[Array]:
        plain = {name: _raw(array) if array.dtype == object else array for name, array in feed.items()}
        try:
            outputs: list[Array] = self._session.run(names, plain, options)
        except UnicodeDecodeError:
            raise InvalidInput("an output of the model holds bytes that are not UTF-8") from None
        return outputs


def _floats(value: ort.OrtValue) -> Array:
    shape = value.shape()
    size = int(np.prod(shape)) * 2
    content = ctypes.string_at(value.data_ptr(), size) if size else b""
    return from_bfloat16_bits(np.frombuffer(content, np.uint16)).reshape(shape)


def _raw(array: Array) -> Array:
    values = array.ravel().tolist()
    if not any(type(value) is bytes for value in values):
        return array
    encoded = [value if isinstance(value, bytes) else str(value).encode() for value in values]
    size = len(encoded[0])
    if size == 0 or any(len(value) != size for value in encoded):
        raise InvalidInput(
            "values that are not UTF-8 must have the same length as all others of their tensor"
        )
    return np.frombuffer(b"".join(encoded), f"V{size}").reshape(array.shape)
