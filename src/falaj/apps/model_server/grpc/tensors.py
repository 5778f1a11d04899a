"""Messages of requests as tensors: read into those of the protocol, or recognised as repeated ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from falaj.apps.model_server.grpc.answers import varint
from falaj.apps.model_server.grpc.messages import ModelInferRequest
from falaj.apps.model_server.inference.protocol import (
    MAX_DIMENSIONS,
    MAX_ID_CHARACTERS,
    MAX_TENSORS,
    InferRequest,
    InputTensor,
    RequestedOutput,
)
from falaj.errors import Fault, InvalidInput, shorten
from falaj.records.serving.tensors import Datatype
from falaj.serving.signatures import invalid_request
from falaj.serving.tensors import NUMPY, from_values

Array = npt.NDArray[Any]

MAX_PARAMETERS = 64
CONTENTS: dict[Datatype, str] = {
    Datatype.BOOL: "bool_contents",
    Datatype.INT8: "int_contents",
    Datatype.INT16: "int_contents",
    Datatype.INT32: "int_contents",
    Datatype.INT64: "int64_contents",
    Datatype.UINT8: "uint_contents",
    Datatype.UINT16: "uint_contents",
    Datatype.UINT32: "uint_contents",
    Datatype.UINT64: "uint64_contents",
    Datatype.FP32: "fp32_contents",
    Datatype.FP64: "fp64_contents",
    Datatype.BYTES: "bytes_contents",
}
"""The field for the values of a datatype; 16-bit floats have none and are sent raw."""

_NO_BYTES = memoryview(b"")


# ------------------------------------------------------------------------------------------- requests


def parse_message(kind: Any, data: bytes) -> Any:
    """Return a message of a class. Raise InvalidInput if the bytes are not one."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise InvalidInput(f"the message is not a {kind.DESCRIPTOR.full_name} of Protocol Buffers") from None


def parse_infer(data: bytes) -> Any:
    return parse_message(ModelInferRequest, data)


def model_path(model: str, version: str, last: str) -> bytes:
    """Return the path of a model in REST, which names what a message asks for."""
    path = f"/v2/models/{quote(model[:200])}"
    if version:
        path += f"/versions/{quote(version[:200])}"
    return (f"{path}/{last}" if last else path).encode()


def read_infer(message: Any) -> InferRequest:
    """Return the request in a message; the data of its tensors are bytes."""
    if len(message.id) > MAX_ID_CHARACTERS:
        given = f"{len(message.id)} characters"
        raise invalid_request([Fault(where="id", given=given, allowed=f"at most {MAX_ID_CHARACTERS}")])
    tensors, raw = message.inputs, message.raw_input_contents
    if len(tensors) > MAX_TENSORS or len(message.outputs) > MAX_TENSORS:
        raise InvalidInput(f"more than {MAX_TENSORS} inputs or outputs")
    if raw and len(raw) != len(tensors):
        raise InvalidInput(
            f"raw_input_contents: given {len(raw)}, allowed none or one for each of the {len(tensors)} inputs"
        )
    if raw:
        inputs = [_raw_input(tensor, content) for tensor, content in zip(tensors, raw, strict=True)]
    else:
        inputs = [_typed_input(tensor) for tensor in tensors]
    outputs = [
        RequestedOutput(tensor.name, _parameters(tensor.parameters) if tensor.parameters else None)
        for tensor in message.outputs
    ]
    parameters = _parameters(message.parameters) if message.parameters else None
    return InferRequest(inputs, message.id, parameters, outputs or None)


def _raw_input(tensor: Any, content: bytes) -> InputTensor:
    shape = list(tensor.shape)
    if len(shape) > MAX_DIMENSIONS:
        raise InvalidInput(f"input '{shorten(tensor.name)}': more than {MAX_DIMENSIONS} dimensions")
    if tensor.HasField("contents"):
        raise InvalidInput(
            f"input '{shorten(tensor.name)}': given contents and raw_input_contents, allowed one"
        )
    parameters = _parameters(tensor.parameters) if tensor.parameters else None
    _require_supported(tensor.name, parameters)
    return InputTensor(tensor.name, shape, tensor.datatype, parameters, memoryview(content))  # type: ignore[arg-type]


def _typed_input(tensor: Any) -> InputTensor:
    """Return an input whose values are in the field for its datatype."""
    shape = list(tensor.shape)
    if len(shape) > MAX_DIMENSIONS:
        raise InvalidInput(f"input '{shorten(tensor.name)}': more than {MAX_DIMENSIONS} dimensions")
    parameters = _parameters(tensor.parameters) if tensor.parameters else None
    _require_supported(tensor.name, parameters)
    data = _NO_BYTES
    if tensor.datatype in CONTENTS:
        data = memoryview(_typed_bytes(tensor, Datatype(tensor.datatype)))
    elif tensor.HasField("contents"):
        words = (
            f"input '{shorten(tensor.name)}': {shorten(tensor.datatype)} is sent in raw_input_contents only"
        )
        raise InvalidInput(words)
    return InputTensor(tensor.name, shape, tensor.datatype, parameters, data)  # type: ignore[arg-type]


def _typed_bytes(tensor: Any, datatype: Datatype) -> bytes:
    name = CONTENTS[datatype]
    others = [field.name for field, _ in tensor.contents.ListFields() if field.name != name]
    if others:
        words = f"given {', '.join(others)}, allowed {name} for {datatype}"
        raise InvalidInput(f"input '{shorten(tensor.name)}': {words}")
    values = getattr(tensor.contents, name)
    if datatype is Datatype.BYTES:
        return b"".join(len(text).to_bytes(4, "little") + text for text in values)
    try:
        return from_values(list(values), datatype).tobytes()
    except (OverflowError, ValueError) as error:
        raise InvalidInput(
            f"input '{shorten(tensor.name)}': given data: {error}, allowed {datatype}"
        ) from None


def _require_supported(name: str, parameters: Mapping[str, object] | None) -> None:
    if parameters and "shared_memory_region" in parameters:
        raise InvalidInput(f"input '{shorten(name)}': shared_memory_region is not supported")


def _parameters(given: Any) -> dict[str, Any]:
    if len(given) > MAX_PARAMETERS:
        raise InvalidInput(f"parameters: given {len(given)}, allowed at most {MAX_PARAMETERS}")
    found = {}
    for name, value in given.items():
        choice = value.WhichOneof("parameter_choice")
        found[name] = None if choice is None else getattr(value, choice)
    return found


# ------------------------------------------------------------------------------------------ templates


class MessageTemplate:
    """A request that a client repeats with other values: all bytes but those of its one raw tensor are the same.

    The length of the tensor is among the equal bytes, so that what was checked once holds for every such message.
    """

    __slots__ = ("_dtype", "_prefix", "_shape", "_size", "facts")

    def __init__(
        self, prefix: bytes, size: int, shape: tuple[int, ...], datatype: Datatype, facts: Any
    ) -> None:
        self._prefix = prefix
        self._size = size
        self._shape = shape
        self._dtype = NUMPY[datatype]
        self.facts = facts

    def array_of(self, message: bytes) -> Array | None:
        """Return the values in a message that fits; None if it does not."""
        prefix = self._prefix
        if len(message) != self._size or not message.startswith(prefix):
            return None
        return np.frombuffer(message[len(prefix) :], self._dtype).reshape(self._shape)


def template_of(data: bytes, message: Any, facts: Any) -> MessageTemplate | None:
    """Return the template of a message that was accepted, if its last bytes are its one tensor of numbers."""
    raw = message.raw_input_contents
    if len(raw) != 1 or not raw[0] or not data.endswith(raw[0]):
        return None
    tensor = message.inputs[0]
    if tensor.datatype in (Datatype.BYTES, Datatype.BOOL, Datatype.BF16):
        return None
    prefix = data[: len(data) - len(raw[0])]
    if not prefix.endswith(b"\x3a" + varint(len(raw[0]))):
        return None
    return MessageTemplate(prefix, len(data), tuple(tensor.shape), Datatype(tensor.datatype), facts)
