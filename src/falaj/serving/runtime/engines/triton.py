"""A Triton Inference Server as the engine of a version: requests are forwarded by the Open Inference Protocol."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Literal
from urllib.parse import quote

import numpy.typing as npt

from falaj.errors import InvalidInput, Unavailable, shorten
from falaj.ports.egress import DeliveryFailed, EgressAnswer
from falaj.records.serving.endpoints import ServedFile
from falaj.records.serving.tensors import DYNAMIC, Datatype, Tensor
from falaj.serving.runtime.engine import MAX_OUTPUT_BYTES
from falaj.serving.runtime.engines.opened import OpenedModel
from falaj.serving.tensors import from_bytes, to_bytes

Array = npt.NDArray[Any]
Ask = Callable[[Literal["GET", "POST"], str, Mapping[str, str], bytes], EgressAnswer]
"""Sends a request to a path of the server. Raises DeliveryFailed."""

ANSWER_BYTES = MAX_OUTPUT_BYTES + 2**20
HEADER_LENGTH = "inference-header-content-length"
LARGEST_DIMENSION = 2**40


def open_remote(file: ServedFile, ask: Ask) -> OpenedModel:
    """Return the version as Triton has it: named `model`, or `workspace+model`, in its repository."""
    model = quote(file.model.replace("/", "+"), safe="")
    path = f"/v2/models/{model}/versions/{file.version}"
    described = _json(file, _asked(file, ask, "GET", path, {}, b""))
    try:
        inputs = tuple(_tensor(each) for each in described["inputs"])
        outputs = tuple(_tensor(each) for each in described["outputs"])
    except (KeyError, TypeError, ValueError) as error:
        raise Unavailable(
            f"Triton describes {file.model}@{file.version} in words that are not known: {error}"
        ) from None

    def run(given: Sequence[Array]) -> list[Array]:
        head, body = _request(inputs, outputs, given)
        headers = {"Inference-Header-Content-Length": str(head), "Content-Type": "application/octet-stream"}
        return _outputs(file, outputs, _asked(file, ask, "POST", f"{path}/infer", headers, body))

    return OpenedModel(str(described.get("platform", "triton"))[:100], inputs, outputs, run)


def _asked(
    file: ServedFile,
    ask: Ask,
    method: Literal["GET", "POST"],
    path: str,
    headers: Mapping[str, str],
    body: bytes,
) -> EgressAnswer:
    name = f"{file.model}@{file.version}"
    try:
        answer = ask(method, path, headers, body)
    except DeliveryFailed as error:
        raise Unavailable(f"Triton did not answer for {name}: {error}") from None
    if answer.status == 200:
        return answer
    words = shorten(answer.body[:300].decode(errors="replace"), limit=300)
    if method == "POST" and answer.status == 400:
        raise InvalidInput(f"Triton refused the values for {name}: {words}")
    if answer.status in (401, 403):
        raise Unavailable(
            f"Triton refuses requests for {name} ({answer.status}): {words}; serving.triton.token names its token"
        )
    raise Unavailable(f"Triton does not serve {name} ({answer.status}): {words}")


def _request(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], given: Sequence[Array]
) -> tuple[int, bytes]:
    """Return the length of the JSON of a request, and the request: the bytes of the tensors follow the JSON."""
    parts = [to_bytes(array, tensor.datatype) for tensor, array in zip(inputs, given, strict=True)]
    tensors = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(array.shape),
            "parameters": {"binary_data_size": len(part)},
        }
        for tensor, array, part in zip(inputs, given, parts, strict=True)
    ]
    wanted = [{"name": tensor.name, "parameters": {"binary_data": True}} for tensor in outputs]
    head = json.dumps({"inputs": tensors, "outputs": wanted}).encode()
    return len(head), b"".join([head, *parts])


def _outputs(file: ServedFile, outputs: Sequence[Tensor], answer: EgressAnswer) -> list[Array]:
    name = f"{file.model}@{file.version}"
    try:
        length = int(answer.headers.get(HEADER_LENGTH, len(answer.body)))
        found, at = {}, length
        for each in json.loads(answer.body[:length])["outputs"]:
            size, shape = int(each["parameters"]["binary_data_size"]), [int(size) for size in each["shape"]]
            if not 0 <= size <= len(answer.body) - at or not all(0 <= n <= LARGEST_DIMENSION for n in shape):
                raise ValueError(f"{each['name']} has {size} bytes of {shape}")
            content = memoryview(answer.body)[at : at + size]
            found[each["name"]] = from_bytes(content, Datatype(each["datatype"]), prod(shape)).reshape(shape)
            at += size
        return [found[tensor.name] for tensor in outputs]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Unavailable(
            f"Triton answered for {name} in words that are not known: {shorten(error)}"
        ) from None


def _json(file: ServedFile, answer: EgressAnswer) -> dict[str, Any]:
    try:
        found = json.loads(answer.body)
        return found if isinstance(found, dict) else {}
    except ValueError:
        raise Unavailable(f"Triton describes {file.model}@{file.version} in other words than JSON") from None


def _tensor(described: Mapping[str, Any]) -> Tensor:
    shape = tuple(DYNAMIC if int(size) < 0 else int(size) for size in described["shape"])
    return Tensor(name=described["name"], datatype=Datatype(described["datatype"]), shape=shape)
