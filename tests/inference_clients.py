"""The same inference by REST and by gRPC, so that a test can run by both: a socket, and the stock client of Triton."""

from __future__ import annotations

import json
from queue import Queue
from typing import Any, Protocol

import numpy as np
import tritonclient.grpc as triton
from google.protobuf.json_format import MessageToDict
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from model_servers import TOKEN, RawClient, RunningServer, request
from polling import PATIENCE_S

PROTOCOLS = ("rest", "grpc")
HTTP_STATUS = {
    "StatusCode.INVALID_ARGUMENT": 400,
    "StatusCode.NOT_FOUND": 404,
    "StatusCode.RESOURCE_EXHAUSTED": 429,
    "StatusCode.UNAVAILABLE": 503,
    "StatusCode.DEADLINE_EXCEEDED": 504,
}
"""What REST answers where gRPC has a status."""


class InferenceClient(Protocol):
    """Sends requests written as in JSON; returns the HTTP status, or its equal, and the answer written likewise."""

    def infer(
        self, model: str, content: dict[str, Any], *, version: str = "", **headers: str
    ) -> tuple[int, Any]: ...
    def close(self) -> None: ...


def connect(protocol: str, server: RunningServer) -> InferenceClient:
    return RestClient(server) if protocol == "rest" else GrpcClient(server)


class RestClient:
    """Sends JSON."""

    def __init__(self, server: RunningServer) -> None:
        self._raw = RawClient(server.port)

    def infer(
        self, model: str, content: dict[str, Any], *, version: str = "", **headers: str
    ) -> tuple[int, Any]:
        path = f"/v2/models/{model}{f'/versions/{version}' if version else ''}/infer"
        status, _, answer = self._raw.ask(request(path=path, body=json.dumps(content).encode(), **headers))
        return status, json.loads(answer)

    def close(self) -> None:
        self._raw.__exit__()


class GrpcClient:
    """Sends messages by `tritonclient.grpc`."""

    def __init__(self, server: RunningServer) -> None:
        self._client = triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")

    def infer(
        self, model: str, content: dict[str, Any], *, version: str = "", **headers: str
    ) -> tuple[int, Any]:
        given = {name.replace("_", "-").lower(): value for name, value in headers.items()}
        try:
            answer = self._client.infer(
                model,
                inputs_of(content),
                model_version=version,
                request_id=content.get("id", ""),
                parameters=content.get("parameters"),
                headers={"authorization": f"Bearer {TOKEN}", **given},
            )
        except InferenceServerException as error:
            return HTTP_STATUS[str(error.status())], {"error": error.message()}
        return 200, as_json(answer)

    def stream(self, model: str, contents: list[dict[str, Any]], **headers: str) -> list[Any]:
        """Send messages by one stream; return their answers, or the words of their errors."""
        found: Queue[tuple[Any, Any]] = Queue()
        given = {name.replace("_", "-").lower(): value for name, value in headers.items()}
        self._client.start_stream(
            lambda result, error: found.put((result, error)),
            headers={"authorization": f"Bearer {TOKEN}", **given},
        )
        for content in contents:
            self._client.async_stream_infer(
                model,
                inputs_of(content),
                request_id=content.get("id", ""),
                parameters=content.get("parameters"),
            )
        answers = [found.get(timeout=PATIENCE_S) for _ in contents]
        self._client.stop_stream()
        return [as_json(result) if error is None else error.message() for result, error in answers]

    def close(self) -> None:
        self._client.close()


def inputs_of(content: dict[str, Any]) -> list[triton.InferInput]:
    """Return the inputs of a request in JSON as those of the client."""
    made = []
    for tensor in content["inputs"]:
        kind = object if tensor["datatype"] == "BYTES" else triton_to_np_dtype(tensor["datatype"])
        array = np.array(tensor["data"], kind).reshape(tensor["shape"])
        made.append(triton.InferInput(tensor["name"], tensor["shape"], tensor["datatype"]))
        made[-1].set_data_from_numpy(array)
    return made


def as_json(answer: triton.InferResult) -> dict[str, Any]:
    """Return an answer as REST writes it."""
    response = answer.get_response()
    parameters = {
        name: next(iter(MessageToDict(value).values())) for name, value in response.parameters.items()
    }
    outputs = [
        {
            "name": output.name,
            "datatype": output.datatype,
            "shape": list(output.shape),
            "data": answer.as_numpy(output.name).ravel().tolist(),
        }
        for output in response.outputs
    ]
    found = {"model_version": response.model_version, "id": response.id, "outputs": outputs}
    for name, value in parameters.items():  # 64-bit numbers are texts in the JSON of Protocol Buffers
        if response.parameters[name].WhichOneof("parameter_choice") == "int64_param":
            parameters[name] = int(value)
    return found | ({"parameters": parameters} if parameters else {})
