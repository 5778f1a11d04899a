"""Small ONNX models, and a real model server in a thread, for the tests of serving."""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from falaj.apps.model_server.process import run, serve
from falaj.apps.model_server.server import ModelServer, listen
from falaj.assembly.model_server import publish_local_socket
from falaj.assembly.platform import LocalPlatform as Assembled
from falaj.errors import Denied, Unauthenticated
from falaj.records.serving.endpoints import Deployment, Endpoint, Route, ServedFile
from polling import PATIENCE_S

TOKEN = "fj_token_1.secret"
OTHER_TOKEN = "fj_token_2.secret"
CALLERS = {TOKEN: "tester", OTHER_TOKEN: "other"}


def save(
    path: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: dict[str, Any]
) -> Path:
    constants = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, path.stem, inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, path)
    return path


def mlp(
    path: Path, *, widths: tuple[int, ...] = (32, 64, 32, 1), rows: int | str = "n", seed: int = 0
) -> Path:
    """Write a multilayer perceptron: dense layers with ReLU."""
    random = np.random.default_rng(seed)
    weights, nodes, value = {}, [], "x"
    for number, (a, b) in enumerate(pairwise(widths)):
        weights[f"w{number}"] = (random.standard_normal((a, b)) / np.sqrt(a)).astype(np.float32)
        weights[f"b{number}"] = random.standard_normal(b).astype(np.float32)
        last = number == len(widths) - 2
        nodes.append(helper.make_node("Gemm", [value, f"w{number}", f"b{number}"], [f"h{number}"]))
        value = "y" if last else f"r{number}"
        nodes.append(helper.make_node("Identity" if last else "Relu", [f"h{number}"], [value]))
    return save(
        path,
        nodes,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, widths[0]])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [rows, widths[-1]])],
        weights,
    )


def constant(path: Path, value: float) -> Path:
    """Write a model that returns `value` for each row, so that a test can tell versions apart."""
    weights = {"w": np.zeros((2, 1), np.float32), "b": np.array([value], np.float32)}
    return save(
        path,
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"])],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 1])],
        weights,
    )


def widened(path: Path, width: int) -> Path:
    """Write a model that repeats one number `width` times: a small request, a large answer."""
    weights = {"w": np.ones((1, width), np.float32)}
    return save(
        path,
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", width])],
        weights,
    )


def tabular(path: Path) -> Path:
    """Write a model with two inputs and outputs: score = amount * 2 + weight of the category, and score > 10."""
    weights = {
        "two": np.array(2, np.float64),
        "ten": np.array(10, np.float64),
        "table": np.arange(5, dtype=np.float64),
    }
    nodes = [
        helper.make_node("Mul", ["amount", "two"], ["doubled"]),
        helper.make_node("Gather", ["table", "category"], ["extra"]),
        helper.make_node("Add", ["doubled", "extra"], ["score"]),
        helper.make_node("Greater", ["score", "ten"], ["high"]),
    ]
    return save(
        path,
        nodes,
        [
            helper.make_tensor_value_info("amount", TensorProto.DOUBLE, ["n"]),
            helper.make_tensor_value_info("category", TensorProto.INT64, ["n"]),
        ],
        [
            helper.make_tensor_value_info("score", TensorProto.DOUBLE, ["n"]),
            helper.make_tensor_value_info("high", TensorProto.BOOL, ["n"]),
        ],
        weights,
    )


def centred(path: Path) -> Path:
    """Write a model that subtracts the mean over rows: a dynamic first dimension, but dependent rows."""
    return save(
        path,
        [
            helper.make_node("ReduceMean", ["x"], ["mean"], axes=[0], keepdims=1),
            helper.make_node("Sub", ["x", "mean"], ["y"]),
        ],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
        {},
    )


def model(
    nodes: list[Any],
    inputs: dict[str, list[Any]],
    outputs: dict[str, list[Any]],
    *,
    kind: int = TensorProto.INT64,
    weights: dict[str, Any] | None = None,
    **more: Any,
) -> onnx.ModelProto:
    """Return a model whose inputs and outputs, by name and shape, are all of one kind."""
    graph = helper.make_graph(
        nodes,
        "model",
        [helper.make_tensor_value_info(name, kind, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, kind, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9, **more)


def counting() -> onnx.ModelProto:
    """A model that counts as far as its input says, one by one."""
    step = helper.make_graph(
        [
            helper.make_node("Add", ["sum", "one"], ["next"]),
            helper.make_node("Identity", ["go"], ["on"]),
        ],
        "step",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("sum", TensorProto.INT64, [1]),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.INT64, [1]),
        ],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["x", "", "zero"], ["y"], body=step)],
        "counts",
        [helper.make_tensor_value_info("x", TensorProto.INT64, [1])],
        [helper.make_tensor_value_info("y", TensorProto.INT64, [1])],
        [
            helper.make_tensor(name, TensorProto.INT64, [1], [value])
            for name, value in (("one", 1), ("zero", 0))
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def filling(*, summed: bool = True) -> onnx.ModelProto:
    """Return a model that makes as many zeros as its input says, and adds them up."""
    nodes = [helper.make_node("ConstantOfShape", ["x"], ["zeros"])]
    nodes.append(
        helper.make_node("ReduceSum", ["zeros"], ["y"], keepdims=0)
        if summed
        else helper.make_node("Identity", ["zeros"], ["y"])
    )
    graph = helper.make_graph(
        nodes,
        "fills",
        [helper.make_tensor_value_info("x", TensorProto.INT64, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [] if summed else ["n"])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def outer_sum() -> onnx.ModelProto:
    """Return a model that needs memory for the square of its rows, and returns one number."""
    return model(
        [
            helper.make_node("Transpose", ["x"], ["turned"], perm=[1, 0]),
            helper.make_node("Add", ["x", "turned"], ["square"]),
            helper.make_node("ReduceSum", ["square"], ["y"], keepdims=0),
        ],
        {"x": ["n", 1]},
        {"y": []},
        kind=TensorProto.FLOAT,
    )


def deployment(*files: tuple[str, str, Path], weights: dict[str, int] | None = None) -> Deployment:
    """Return a deployment with an endpoint per model; `weights` are those of the versions."""
    names = dict.fromkeys(name for name, _, _ in files)
    return Deployment(
        models=tuple(ServedFile(model=name, version=version, path=path) for name, version, path in files),
        endpoints=tuple(
            Endpoint(
                name=name,
                model=name,
                routes=tuple(
                    Route(version=v, weight=(weights or {}).get(v, 100)) for n, v, _ in files if n == name
                ),
            )
            for name in names
        ),
    )


class KnownTokens:
    """Admits the tokens of two callers to all endpoints but `forbidden`, and counts the decisions."""

    def __init__(self) -> None:
        self.authentications = 0
        self.decisions = 0
        self._recognized: set[str] = set()
        self._known: set[tuple[str, str | None]] = set()

    def recognize(self, credential: str) -> str | None:
        return CALLERS[credential] if credential in self._recognized else None

    def authenticate(self, credential: str) -> str:
        self.authentications += 1
        if credential not in CALLERS:
            raise Unauthenticated("the token is unknown, expired or revoked")
        self._recognized.add(credential)
        return CALLERS[credential]

    def admit(self, credential: str, endpoint: str | None, data: bytes, *, calls: int = 1) -> str | None:
        return CALLERS[credential] if (credential, endpoint) in self._known else None

    def decide(self, credential: str, endpoint: str | None) -> None:
        self.decisions += 1
        if credential not in CALLERS:
            raise Unauthenticated("the token is unknown, expired or revoked")
        if endpoint == "forbidden":
            raise Denied("tester may not do that")
        self._known.add((credential, endpoint))

    def permitted(self, credential: str, endpoints: Sequence[str]) -> Sequence[str]:
        return [name for name in endpoints if name != "forbidden"]


class RunningServer:
    """A model server in its own thread."""

    def __init__(
        self, server: ModelServer, loop: asyncio.AbstractEventLoop, port: int, grpc_port: int
    ) -> None:
        self.server = server
        self.port = port
        self.grpc_port = grpc_port
        self._loop = loop

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` on the event loop of the server until it ends."""
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def apply(self, wanted: Deployment) -> None:
        self.do(self.server.apply(wanted))

    def stop(self) -> None:
        self.do(self.server.stop())


@contextmanager
def serving(wanted: Deployment | None, **options: Any) -> Iterator[RunningServer]:
    """Run a server that serves `wanted`, and stop it afterwards; none: it has loaded nothing yet."""
    started = threading.Event()
    found: list[RunningServer | BaseException] = []
    ended: list[Callable[[], object]] = []

    async def main() -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        ended.append(lambda: loop.call_soon_threadsafe(over.set))
        tls = options.pop("tls", None)
        server = ModelServer(options.pop("admission", None) or KnownTokens(), **options)
        listener = listen("127.0.0.1", 0)
        await server.start(listener, tls=tls)
        grpc_listener = listen("127.0.0.1", 0)
        server.accept_grpc(grpc_listener, tls=tls)
        if wanted is not None:
            await server.apply(wanted)
        ports = (listener.getsockname()[1], grpc_listener.getsockname()[1])
        found.append(RunningServer(server, loop, *ports))
        started.set()
        await over.wait()
        if not server.stopping:
            await server.stop()

    thread = threading.Thread(target=_run, args=(main, found, started), name="model server")
    thread.start()
    assert started.wait(PATIENCE_S)
    try:
        running = found[0]
        if isinstance(running, BaseException):
            raise running
        yield running
    finally:
        for end in ended:
            end()
        thread.join(PATIENCE_S)


def _run(main: Callable[[], Awaitable[None]], found: list[Any], started: threading.Event) -> None:
    try:
        run(main)
    except BaseException as error:
        found.append(error)
        started.set()


@contextmanager
def serving_platform(parts: Assembled) -> Iterator[str]:
    """Run the model server of a platform in a thread, as its process would, and yield its URL."""
    started = threading.Event()
    found: list[Any] = []
    ended: list[Callable[[], object]] = []

    async def main() -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        ended.append(lambda: loop.call_soon_threadsafe(over.set))

        def ready(url: str) -> None:
            found.append(url)
            address = f"127.0.0.1:{grpc.getsockname()[1]}"
            facts = {"url": url, "models": url, "models_grpc": address, "pid": os.getpid()}
            parts.home.running.write_text(json.dumps(facts))
            started.set()

        with parts.home.lock(), publish_local_socket(parts.home) as inner:
            grpc = listen("127.0.0.1", 0)
            await serve(parts, listen("127.0.0.1", 0), inner, ready=ready, until=over.wait, grpc=grpc)

    thread = threading.Thread(target=_run, args=(main, found, started), name="model server")
    thread.start()
    try:
        assert started.wait(PATIENCE_S)
        if isinstance(found[0], BaseException):
            raise found[0]
        yield found[0]
    finally:
        for end in ended:
            end()
        thread.join(PATIENCE_S)


# ---------------------------------------------------------------------------------------------- raw HTTP


def request(
    method: str = "POST",
    path: str = "/v2/models/m/infer",
    body: bytes = b"",
    token: str | None = TOKEN,
    **headers: str,
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: test"]
    lines += [f"Authorization: Bearer {token}"] if token else []
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if "Transfer_Encoding" not in headers and "Content_Length" not in headers:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


class RawClient:
    """A socket client that can send malformed HTTP."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        self._reader = self.socket.makefile("rb")

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def line(self) -> bytes:
        return self._reader.readline()

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Read the next response: status, headers, body. Status 0 means that the server closed the connection."""
        first = self.line()
        if not first:
            return 0, {}, b""
        headers = {}
        while line := self.line().strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        return int(first.split()[1]), headers, self._reader.read(int(headers.get("content-length", 0)))

    def ask(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        self.send(data)
        return self.answer()

    def has_answer(self) -> bool:
        """Return whether something has come that was not read yet."""
        return bool(select.select([self.socket], [], [], 0)[0])

    @property
    def is_closed(self) -> bool:
        return self._reader.read(1) == b""
