"""The Open Inference Protocol V2: JSON requests and responses, with optional binary tensors after the JSON."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy.typing as npt

from falaj.apps.model_server.inference.classification import can_classify, classify
from falaj.apps.model_server.inference.json_values import encode_values, has_words, mark_words, unmarked
from falaj.errors import Fault, InvalidInput, TooLarge, shorten
from falaj.records.serving.tensors import Datatype, ServedModel, Tensor
from falaj.serving.signatures import invalid_request
from falaj.serving.tensors import from_bytes, from_values, to_bytes

Array = npt.NDArray[Any]
Parameters = Annotated[dict[str, str | int | float | bool | None], msgspec.Meta(max_length=64)]

MAX_TENSORS, MAX_DIMENSIONS = 4096, 32
"""Inputs or outputs of a request, and dimensions of a tensor."""
LONG_JSON_BYTES = 64 * 1024
"""Tensors of a longer text are counted before any of them is parsed."""
TensorName = Annotated[str, msgspec.Meta(max_length=1024)]

UNSUPPORTED = ("shared_memory_region",)
"""Extensions of the protocol that are not supported."""
MAX_TIMEOUT_US = 3_600_000_000
MAX_PRIORITY = 2**32


MAX_ID_CHARACTERS = 256
"""Longest id of a request, which is logged with every prediction."""

MAX_JSON_BYTES = 16 * 2**20
"""Largest output that is encoded as JSON, which takes many times its memory."""

CACHED_SHAPES = 1000
"""Encoded output shapes that are cached."""


class InputTensor(msgspec.Struct, gc=False):
    """An input of a request. Its data is JSON, or a view of the bytes after the JSON."""

    name: TensorName
    shape: Annotated[list[int], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    datatype: str
    parameters: Parameters | None = None
    data: msgspec.Raw = msgspec.Raw()


class RequestedOutput(msgspec.Struct, gc=False):
    """An output named in a request."""

    name: TensorName
    parameters: Parameters | None = None


class InferRequest(msgspec.Struct):
    inputs: Annotated[list[InputTensor], msgspec.Meta(max_length=MAX_TENSORS)]
    id: str = ""
    parameters: Parameters | None = None
    outputs: Annotated[list[RequestedOutput], msgspec.Meta(max_length=MAX_TENSORS)] | None = None


class RequestOutline(msgspec.Struct):
    """A request whose tensors are not parsed yet."""

    inputs: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_TENSORS)]
    outputs: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_TENSORS)] | None = None


class OutputChoice(NamedTuple):
    """An output of a response by number; `classes`: only as many of its highest values, as texts."""

    number: int
    is_binary: bool
    classes: int = 0


OutputSelection = tuple[OutputChoice, ...]

FLOATS = frozenset({Datatype.FP16, Datatype.BF16, Datatype.FP32, Datatype.FP64})

_read = msgspec.json.Decoder(InferRequest).decode
_outline = msgspec.json.Decoder(RequestOutline).decode
_encode = msgspec.json.Encoder().encode
_kinds: dict[Datatype, type] = {
    datatype: kind
    for kind, names in {
        bool: ["BOOL"],
        str: ["BYTES"],
        float: ["FP16", "BF16", "FP32", "FP64"],
        int: ["INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"],
    }.items()
    for datatype in map(Datatype, names)
}
_flat = {
    datatype: msgspec.json.Decoder(list[kind]).decode  # type: ignore[valid-type]
    for datatype, kind in _kinds.items()
}
_flat_marked = msgspec.json.Decoder(list[float | str]).decode


# ------------------------------------------------------------------------------------------ requests


def read_request(body: bytes | memoryview, json_bytes: int | None) -> InferRequest:
    """Parse `body`: the first `json_bytes` are JSON and the rest binary tensors; None: all is JSON."""
    if json_bytes is not None and json_bytes > len(body):
        raise InvalidInput(f"Inference-Header-Content-Length is {json_bytes}, the body has {len(body)} bytes")
    text = body if json_bytes is None else memoryview(body)[:json_bytes]
    try:
        request = _read_json(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        words = None if isinstance(error, msgspec.ValidationError) else mark_words(text)
        request = _read_marked(words, error)
    if len(request.id) > MAX_ID_CHARACTERS:
        given = f"{len(request.id)} characters"
        raise invalid_request([Fault(where="id", given=given, allowed=f"at most {MAX_ID_CHARACTERS}")])
    if json_bytes is not None or any(tensor.parameters for tensor in request.inputs):
        _assign_binary_data(
            request.inputs, memoryview(body)[len(body) if json_bytes is None else json_bytes :]
        )
    return request


def _read_json(text: bytes | memoryview) -> InferRequest:
    if len(text) > LONG_JSON_BYTES:
        _outline(text)
    found: InferRequest = _read(text)
    return found


def _read_marked(text: bytes | None, error: Exception) -> InferRequest:
    """Parse a request that has words like NaN among its numbers; `error` is what it is refused for if it has none."""
    try:
        if text is not None:
            return _read_json(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as other:
        error = other
    raise InvalidInput(f"the body is not an inference request: {error}") from None


def read_values(tensor: InputTensor, datatype: Datatype, count: int) -> Array:
    """Return the data of a tensor as a flat array. Raise ValueError or OverflowError if it is invalid."""
    data: Any = tensor.data
    if isinstance(data, memoryview):
        return from_bytes(data, datatype, count)
    try:
        values = _flat[datatype](data)
    except (msgspec.DecodeError, RecursionError) as error:
        values = _nested(tensor, datatype, error)
    if datatype is Datatype.BYTES and has_words(bytes(data)):
        raise ValueError("Expected `str`, got `float`")
    if len(values) != count:
        raise ValueError(f"{len(values)} values, where the shape needs {count}")
    return from_values(values, datatype)


def _assign_binary_data(tensors: Sequence[InputTensor], rest: memoryview) -> None:
    """Assign each tensor with a `binary_data_size` its part of the bytes after the JSON."""
    at = 0
    for tensor in tensors:
        parameters = tensor.parameters or {}
        for name in UNSUPPORTED:
            if name in parameters:
                raise InvalidInput(f"input '{shorten(tensor.name)}': {name} is not supported")
        size = parameters.get("binary_data_size")
        if size is None:
            continue
        if type(size) is not int or not 0 <= size <= len(rest) - at:
            fault = f"{shorten(size)}, allowed 0 to the {len(rest) - at} bytes that follow the JSON"
            raise InvalidInput(f"input '{shorten(tensor.name)}': given binary_data_size {fault}")
        tensor.data = rest[at : at + size]  # type: ignore[assignment]
        at += size
    if at != len(rest):
        raise InvalidInput(f"{len(rest) - at} bytes follow the JSON that no binary_data_size covers")


def _nested(tensor: InputTensor, datatype: Datatype, error: Exception) -> list[Any]:
    """Flatten nested lists, which must have the tensor's shape."""
    data = bytes(tensor.data)
    if not data:
        raise ValueError("none") from None
    marked = datatype in FLOATS and has_words(data)
    if not NESTED.match(data):
        if marked:
            return unmarked(_flat_marked(data))
        raise ValueError(str(error)) from None
    kind: Any = float | str if marked else _kinds[datatype]
    try:
        level: list[Any] = _nested_decoder(tuple(tensor.shape), kind).decode(data)
    except RecursionError:
        raise ValueError("lists that are nested too deeply") from None
    except msgspec.DecodeError as wrong:
        if isinstance(wrong, msgspec.ValidationError) and _KIND_WORDS.search(str(wrong)):
            raise ValueError(str(wrong)) from None
        raise ValueError(f"nested lists that do not match the shape {tensor.shape}") from None
    for _ in tensor.shape[1:]:
        level = [value for part in level for value in part]
    return unmarked(level) if marked else level


NESTED = re.compile(rb"\s*\[\s*\[")
_KIND_WORDS = re.compile("got `(str|null|bool|object|float)`|out of range")


@lru_cache(maxsize=256)
def _nested_decoder(shape: tuple[int, ...], kind: Any) -> Any:
    """Return a decoder of lists of exactly this shape, which stops at the first that has another length."""
    found: Any = kind
    for size in reversed(shape):
        found = Annotated[list[found], msgspec.Meta(min_length=size, max_length=size)]
    return msgspec.json.Decoder(found)


# ----------------------------------------------------------------------------------------- responses


def select_outputs(request: InferRequest, model: ServedModel) -> OutputSelection:
    """Return the requested outputs, by default all, and whether each is binary."""
    binary = bool(request.parameters and request.parameters.get("binary_data_output"))
    if not request.outputs:
        return tuple(OutputChoice(number, binary) for number in range(len(model.outputs)))
    numbers = {tensor.name: number for number, tensor in enumerate(model.outputs)}
    allowed = f"the outputs {', '.join(map(str, model.outputs))}"
    faults = [
        Fault(where=f"output '{shorten(name)}'", given="a duplicate", allowed="each output once")
        for name, times in Counter(wanted.name for wanted in request.outputs).items()
        if times > 1
    ]
    selection = []
    for wanted in request.outputs:
        parameters = wanted.parameters or {}
        where, number = f"output '{shorten(wanted.name)}'", numbers.get(wanted.name)
        unsupported = [name for name in UNSUPPORTED if name in parameters]
        if number is None or unsupported:
            given = f"{unsupported[0]}, which is not supported" if unsupported else "an unknown name"
            faults.append(Fault(where=where, given=given, allowed=allowed))
            continue
        classes = parameters.get("classification", 0)
        if "classification" in parameters and not _is_class_count(classes, model.outputs[number]):
            given = f"classification {shorten(classes)} of {model.outputs[number].datatype}"
            faults.append(
                Fault(where=where, given=given, allowed="a number of classes from 1, of an output of numbers")
            )
            continue
        is_binary = bool(parameters.get("binary_data", binary))
        selection.append(OutputChoice(number, is_binary, int(classes or 0)))
    if faults:
        raise invalid_request(faults)
    return tuple(selection)


def _is_class_count(value: object, tensor: Tensor) -> bool:
    return type(value) is int and 1 <= value < 2**31 and can_classify(tensor)


def read_schedule(request: InferRequest) -> tuple[int, float | None]:
    """Return the priority of a request, and the seconds after which it is no longer wanted, if it says so."""
    parameters = request.parameters or {}
    priority, timeout_us = parameters.get("priority", 0), parameters.get("timeout", 0)
    faults = []
    if type(priority) is not int or not 0 <= priority < MAX_PRIORITY:
        allowed = "a whole number: 1 is the highest, 0 the default"
        faults.append(Fault(where="parameter 'priority'", given=shorten(priority), allowed=allowed))
    if type(timeout_us) is not int or not 0 <= timeout_us <= MAX_TIMEOUT_US:
        allowed = f"microseconds, from 1 to {MAX_TIMEOUT_US}; 0: no limit"
        faults.append(Fault(where="parameter 'timeout'", given=shorten(timeout_us), allowed=allowed))
    if faults or type(priority) is not int or type(timeout_us) is not int:
        raise invalid_request(faults)
    return priority, timeout_us / 1e6 if timeout_us else None


class ResponseEncoder:
    """Encodes the responses of one version of an endpoint; constant parts are encoded once."""

    def __init__(self, endpoint: str, model: ServedModel) -> None:
        self._model = model
        self._all = tuple(OutputChoice(number, False) for number in range(len(model.outputs)))
        self._shapes: dict[tuple[int, ...], bytes] = {}
        start = _encode({"model_name": endpoint, "model_version": model.version})
        self._start = start[:-1]
        self._tensors = [
            (tensor.datatype, _tensor_head(tensor.name, tensor.datatype)) for tensor in model.outputs
        ]

    def selection(self, request: InferRequest) -> OutputSelection:
        """Return the requested outputs; usually all, as JSON."""
        plain = request.outputs is None and request.parameters is None
        return self._all if plain else select_outputs(request, self._model)

    def encode(
        self,
        request: str,
        prediction: str,
        outputs: Sequence[Array],
        selection: OutputSelection,
        *,
        notes: bytes = b"",
    ) -> tuple[bytes, int | None]:
        """Return the body of a response, and the size of its JSON part if binary tensors follow.

        Its id is that of the request, or that of the prediction if the request has none. `notes` are parameters from
        `encode_parameters`.
        """
        start = self._start
        if request:
            start = start + b',"id":' + _encode(request)
            if prediction:
                notes = b'"prediction":"%b"%b%b' % (prediction.encode(), b"," if notes else b"", notes)
        elif prediction:
            start = start + b',"id":"%b"' % prediction.encode()
        if notes:
            start = start + b',"parameters":{%b}' % notes
        parts, blocks = [], []
        for number, binary, classes in selection:
            datatype, head = self._tensors[number]
            array = outputs[number]
            if classes:
                array, datatype = classify(array, self._model.outputs[number], classes), Datatype.BYTES
                head = _tensor_head(self._model.outputs[number].name, datatype)
            if binary:
                block = to_bytes(array, datatype)
                blocks.append(block)
                tail = b',"parameters":{"binary_data_size":%d}}' % len(block)
            else:
                require_small_json(array)
                tail = b',"data":' + encode_values(array) + b"}"
            parts.append(head + (self._shapes.get(array.shape) or self._shape(array.shape)) + tail)
        text = start + b',"outputs":[' + b",".join(parts) + b"]}"
        return (text, None) if not blocks else (b"".join((text, *blocks)), len(text))

    def _shape(self, shape: tuple[int, ...]) -> bytes:
        if len(self._shapes) > CACHED_SHAPES:
            self._shapes.clear()
        return self._shapes.setdefault(shape, _encode(shape))


def _tensor_head(name: str, datatype: Datatype) -> bytes:
    head: bytes = _encode({"name": name, "datatype": datatype})
    return head[:-1] + b',"shape":'


def encode_parameters(parameters: Mapping[str, str | int | float]) -> bytes:
    """Return parameters of a response without their braces."""
    encoded: bytes = _encode(parameters)
    return encoded[1:-1]


def require_small_json(array: Array) -> None:
    """Raise TooLarge if an output is too large for text."""
    if array.nbytes > MAX_JSON_BYTES:
        raise TooLarge(
            f"an output has {array.nbytes} bytes; as JSON at most {MAX_JSON_BYTES} are sent, so ask for it as "
            "binary data (binary_data_output)"
        )
