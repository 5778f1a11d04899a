"""ResNet-50 and a small transformer encoder through the endpoint on a GPU, beside the same program called directly.

    python benchmarks/serving_gpu.py [--tiny] [--gpu-price 4.0] [--cpu-price 0.8] [--seconds 8]

The weights are random: they do not change the time. A program is exported once (.pt2), served by the model server in
this process (the program itself runs in a worker process, as always), and asked over REST with binary tensors by a
client process. Peer: the same file, opened by torch here and called from NumPy to NumPy through pinned memory, at the
batch that is best for it. The CPU's figures are those of the endpoint with `device = cpu` and all cores. Prices are
those of an hour of the machine. Without a GPU it runs on the CPU alone; --tiny makes the networks small.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKEN = "0123456789abcdef0123456789abcdef"
CONNECTIONS = 16
GB = 2**30


# ------------------------------------------------------------------------------------------------ networks


def resnet50(width: int, classes: int) -> Any:
    """ResNet-50 of bottleneck blocks; `width` is 64 for the network of the paper. Pixels are bytes."""
    import torch
    from torch import nn

    class Bottleneck(nn.Module):
        def __init__(self, given: int, inner: int, stride: int) -> None:
            super().__init__()
            made = 4 * inner
            self.body = nn.Sequential(
                *(nn.Conv2d(given, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()),
                *(nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()),
                *(nn.Conv2d(inner, made, 1, bias=False), nn.BatchNorm2d(made)),
            )
            self.skip: nn.Module = nn.Identity()
            if stride != 1 or given != made:
                self.skip = nn.Sequential(nn.Conv2d(given, made, 1, stride, bias=False), nn.BatchNorm2d(made))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.body(x) + self.skip(x))

    class ResNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            blocks: list[nn.Module] = [*stem, nn.MaxPool2d(3, 2, 1)]
            given = width
            for stage, count in enumerate((3, 4, 6, 3)):
                inner = width * 2**stage
                for number in range(count):
                    blocks.append(Bottleneck(given, inner, 2 if stage and not number else 1))
                    given = 4 * inner
            self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(given, classes)

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            x = (pixels.to(self.head.weight.dtype) - 127.5) / 64
            return self.head(self.blocks(x).mean((2, 3))).float()

    return ResNet().eval()


def encoder(layers: int, width: int, length: int, words: int = 8192) -> Any:
    """A transformer encoder over tokens, whose mean is classified."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
            self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = self.mix(self.first(x)).reshape(-1, length, 3, 8, width // 8).permute(2, 0, 3, 1, 4)
            seen = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2])
            x = x + self.out(seen.transpose(1, 2).reshape(-1, length, width))
            return x + self.wide(self.second(x))

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.randn(length, width))
            self.blocks, self.head = nn.Sequential(*(Block() for _ in range(layers))), nn.Linear(width, 16)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.blocks(self.words(tokens) + self.places).mean(1)).float()

    return Encoder().eval()


@dataclass(frozen=True)
class Network:
    """A network, its input of one row, and the batches that are tried."""

    name: str
    module: Any
    shape: tuple[int, ...]
    datatype: str
    dtype: str
    batches: tuple[int, ...]

    def rows(self, count: int) -> Any:
        import numpy as np

        return np.random.default_rng(count).integers(0, 255, (count, *self.shape)).astype(self.dtype)


def networks(tiny: bool) -> list[Network]:
    side, length = (32, 16) if tiny else (224, 128)
    image = resnet50(8, 10) if tiny else resnet50(64, 1000)
    text = encoder(2, 64, length) if tiny else encoder(6, 512, length)
    tried = (4, 16) if tiny else (32, 64, 128, 256)
    return [
        Network("ResNet-50", image, (3, side, side), "UINT8", "u1", tried),
        Network("transformer encoder", text, (length,), "INT32", "<i4", tried),
    ]


def exported(network: Network, precision: str) -> bytes:
    """Return the network as a torch export with a dynamic batch, without example inputs."""
    import torch

    module = network.module.to(getattr(torch, precision))
    example = torch.from_numpy(network.rows(4))
    program = torch.export.export(module, (example,), dynamic_shapes=({0: torch.export.Dim("n", max=4096)},))
    program._example_inputs = None
    content = io.BytesIO()
    torch.export.save(program, content)
    return content.getvalue()


# ------------------------------------------------------------------------------------------------ directly


def direct(content: bytes, network: Network, device: str, seconds: float) -> tuple[int, float]:
    """Return the best batch of the program on `device`, and its rows a second, from NumPy to NumPy."""
    import torch
    from torch.export.passes import move_to_device_pass

    program = move_to_device_pass(torch.export.load(io.BytesIO(content)), device).module()
    best = (0, 0.0)
    for batch in network.batches:
        given = torch.from_numpy(network.rows(batch))
        if device == "cuda":
            given = given.pin_memory()

        def run(given: Any = given) -> Any:
            with torch.inference_mode():
                return program(given.to(device, non_blocking=True)).cpu().numpy()

        rate = batch / timed(run, seconds)
        print(f"  {network.name} directly on {device}, batch {batch}: {rate:,.0f} rows/s", flush=True)
        best = max(best, (batch, rate), key=lambda each: each[1])
    return best


def timed(run: Any, seconds: float) -> float:
    """Return the seconds of a call, over many of them."""
    for _ in range(3):
        run()
    began, calls = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds or calls < 3:
        run()
        calls += 1
    return passed / calls


# ------------------------------------------------------------------------------------------ the endpoint


class AdmitsOne:
    """Admits one token to everything."""

    def recognize(self, credential: str) -> str | None:
        return "user" if credential == TOKEN else None

    def authenticate(self, credential: str) -> str:
        return "user"

    def admit(self, credential: str, endpoint: str | None, data: bytes, *, calls: int = 1) -> str | None:
        return "user"

    def decide(self, credential: str, endpoint: str | None) -> None:
        return None


@contextmanager
def served(content: bytes, device: str, **settings: Any) -> Iterator[int]:
    """Serve the program on `device` with a model server in a thread; yield its port."""
    from dataclasses import replace

    from falaj.apps.model_server.limits import ServerLimits
    from falaj.apps.model_server.server import ModelServer, listen
    from falaj.records.registry import FileFormat
    from falaj.records.serving.endpoints import Deployment, Endpoint, Route, ServedFile
    from falaj.records.serving.settings import ServingSettings
    from falaj.serving.runtime.loading import open_model

    chosen = ServingSettings(device="gpu" if device == "cuda" else "cpu", max_queue_ms=60_000, **settings)
    file = ServedFile(model="m", version="1", format=FileFormat.TORCH_EXPORT, settings=chosen)
    endpoint = Endpoint(name="m", model="m", routes=(Route(version="1"),), settings=chosen)
    limits = replace(ServerLimits(), body_bytes=GB, held_bytes=8 * GB)
    started: list[Any] = []
    ready = threading.Event()

    async def main() -> None:
        over = asyncio.Event()
        try:
            server = ModelServer(
                AdmitsOne(),
                limits=limits,
                load=lambda wanted: open_model(wanted, content, memory_bytes=16 * GB),
            )
            listener = listen("127.0.0.1", 0)
            await server.start(listener)
            await server.apply(Deployment(models=(file,), endpoints=(endpoint,)))
        except BaseException as error:
            started.append(error)
            ready.set()
            return
        started.extend([listener.getsockname()[1], asyncio.get_running_loop(), over])
        ready.set()
        await over.wait()
        await server.stop()

    def run() -> None:
        try:
            import uvloop

            uvloop.run(main())
        except ImportError:
            asyncio.run(main())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait()
    if isinstance(started[0], BaseException):
        raise started[0]
    try:
        yield started[0]
    finally:
        started[1].call_soon_threadsafe(started[2].set)
        thread.join(30)


def asked(port: int, network: Network, *, rows: int, connections: int, seconds: float) -> dict[str, float]:
    """Return rows a second and latencies (ms) of a client process with so many connections."""
    facts = {"port": port, "rows": rows, "connections": connections, "seconds": seconds}
    facts |= {"shape": network.shape, "datatype": network.datatype, "dtype": network.dtype}
    command = [sys.executable, __file__, "--client", json.dumps(facts)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def client(facts: dict[str, Any]) -> None:
    """Ask over several connections, one request in flight on each; print the figures."""
    name = "pixels" if facts["datatype"] == "UINT8" else "tokens"
    shape, rows = facts["shape"], facts["rows"]
    count = rows
    for size in shape:
        count *= size
    if facts["dtype"] == "u1":
        data = os.urandom(count)
    else:
        data = b"".join((value % 255).to_bytes(4, "little") for value in range(count))
    tensor = {"name": name, "shape": [rows, *shape], "datatype": facts["datatype"]}
    tensor["parameters"] = {"binary_data_size": len(data)}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Authorization": f"Bearer {TOKEN}", "Inference-Header-Content-Length": str(len(head))}
    body = head + data
    times: list[float] = []
    start = threading.Barrier(facts["connections"] + 1)
    until = [0.0]

    def ask() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", facts["port"], timeout=120)
        for number in range(10**9):
            began = time.perf_counter()
            connection.request("POST", "/v2/models/m/infer", body, headers)
            answer = connection.getresponse()
            content = answer.read()
            ended = time.perf_counter()
            if answer.status != 200:
                raise SystemExit(f"{answer.status}: {content[:500]!r}")
            if number == 2:
                start.wait()
            elif number > 2:
                if ended > until[0]:
                    return
                times.append(ended - began)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(facts["connections"])]
    for thread in threads:
        thread.start()
    until[0] = float("inf")
    start.wait(120)
    began = time.perf_counter()
    until[0] = began + facts["seconds"]
    for thread in threads:
        thread.join()
    times.sort()
    found = {
        "rate": rows * len(times) / facts["seconds"],
        "p50_ms": 1000 * times[len(times) // 2],
        "p99_ms": 1000 * times[min(len(times) - 1, int(len(times) * 0.99))],
    }
    print(json.dumps(found), flush=True)


# ---------------------------------------------------------------------------------------------- the report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help="small networks, for a machine without a GPU")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--gpu-price", type=float, default=4.0, help="of an hour of the machine with its GPU")
    parser.add_argument("--cpu-price", type=float, default=0.8, help="of an hour of the machine without it")
    parser.add_argument("--compiled", action="store_true", help="let torch compile the program in the worker")
    given = parser.parse_args()
    if given.client:
        client(json.loads(given.client))
        return
    import torch

    from harness import Result, Rule, report, show

    device = "cuda" if torch.cuda.is_available() else "cpu"
    gpu = torch.cuda.get_device_name() if device == "cuda" else "no GPU: figures of the CPU"
    print(f"torch {torch.__version__}, {gpu}, {os.cpu_count()} cores", flush=True)
    results = []
    for network in networks(given.tiny):
        content = exported(network, "bfloat16" if device == "cuda" else "float32")
        best, rate = direct(content, network, device, given.seconds)
        if device == "cuda":
            torch.cuda.empty_cache()
        here = through_endpoint(content, network, device, best, given.seconds, compiled=given.compiled)
        there = here
        if device == "cuda":
            plain = exported(network, "float32")
            batch = min(network.batches)
            there = through_endpoint(plain, network, "cpu", batch, given.seconds, compiled=False)
        print(f"  {network.name}: {describe('endpoint', here)}; {describe('on the CPU', there)}", flush=True)
        gpu_cost, cpu_cost = (
            price / 3600 / found["rate"] * 1e6
            for price, found in ((given.gpu_price, here), (given.cpu_price, there))
        )
        results += [
            Result(
                f"{network.name}, rows/s at batch {best}, endpoint / direct",
                here["rate"],
                rate,
                0.9,
                Rule.RATIO_AT_LEAST,
            ),
            Result(
                f"{network.name}, p99 ms at batch 1, {device} / CPU", here["p99_ms"], there["p99_ms"], 1.0
            ),
            Result(f"{network.name}, cost of 1M predictions, {device} / CPU", gpu_cost, cpu_cost, 1.0),
        ]
    if device == "cuda":
        report("serving_gpu", results)
    else:  # a claim about GPUs is kept only from one
        show("serving_gpu", results)


def through_endpoint(
    content: bytes, network: Network, device: str, batch: int, seconds: float, *, compiled: bool
) -> dict[str, float]:
    """Return the rows a second at `batch`, and the latency of single rows from one connection."""
    cores = os.cpu_count() or 1
    runs = {"instances": 8} if device == "cuda" else {"instances": 1, "threads": min(cores, 64)}
    with served(content, device, max_batch_rows=batch, compiled=compiled or None, **runs) as port:
        full = asked(port, network, rows=batch, connections=CONNECTIONS, seconds=seconds)
        alone = asked(port, network, rows=1, connections=1, seconds=seconds)
    return {"rate": full["rate"], "p50_ms": alone["p50_ms"], "p99_ms": alone["p99_ms"]}


def describe(where: str, found: dict[str, float]) -> str:
    return (
        f"{where} {found['rate']:,.0f} rows/s, batch 1 p50 {found['p50_ms']:.2f} p99 {found['p99_ms']:.2f} ms"
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
