"""A model of about 2 ms a row under three times the load that it can bear, by an open-loop generator.

First the capacity is measured, then requests arrive at random: 10 s of normal load (0.6 of the capacity), 20 s of three
times the capacity, and 10 s of normal load. The peer is FastAPI with a thread per core, which queues without limit; it
gets a shorter overload. At last the model server is killed under normal load.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from harness import Result, Rule, environment, free_port, peer_venv, process_tree, report, say
from serving_rest import PARTS, PEER, alternate, falaj_serving, measured, serving

QUICK = False
CHANNELS, SIDE, LAYERS = 64, 16, 12
NORMAL = 0.6
OVERLOAD = 3.0
BODIES = 50
CLIENTS = 8
WARM_UP_S = 8
NORMAL_S, OVERLOAD_S, PEER_OVERLOAD_S, KILL_S = 10, 20, 5, 5
RECOVERED_S = 1.0
"""Time after the overload from which latency has to be normal again."""
KILL_AT_S = 5.0


class Answer(NamedTuple):
    """A request of the generator, in seconds since its start."""

    at: float
    latency: float
    status: int
    is_right: bool


class Phase(NamedTuple):
    """Latencies at p99 in ms, and how many requests a second were accepted."""

    accepted_p99: float
    refused_p99: float
    goodput: float
    refused: int
    failed: int


def main() -> None:
    python = peer_venv("fastapi-onnx", PEER)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        model = save_model_b(folder / "b.onnx")
        bodies = save_bodies(folder / "bodies.json", model)
        theirs = free_port()
        with (
            falaj_serving(folder / "falaj", model) as (port, pid, token),
            serving([python, PARTS / "fastapi_threads.py", model, str(theirs)], theirs) as (_, peer, _),
        ):
            capacity, peer_capacity = capacities((port, pid, token), (theirs, peer, "none"))
            ours = Server(port, token, bodies, folder / "seen.json")
            normal, overload, recovery, growth = overloaded(ours, pid, capacity, OVERLOAD_S)
            back_s, wrong = killed(ours, pid, capacity)
            server = Server(theirs, "none", bodies, folder / "seen.json")
            their_normal, their_overload, _, their_growth = overloaded(
                server, peer, peer_capacity, PEER_OVERLOAD_S
            )
    ratio = overload.accepted_p99 / normal.accepted_p99
    their_ratio = their_overload.accepted_p99 / their_normal.accepted_p99
    at_most = Rule.FALAJ_AT_MOST
    report(
        "serving_overload",
        [
            Result("requests/s", capacity, peer_capacity, 0.95, Rule.RATIO_AT_LEAST),
            Result("accepted requests/s in overload", overload.goodput, capacity, 0.9, Rule.RATIO_AT_LEAST),
            Result("accepted p99 in overload / normal", ratio, their_ratio, 3, at_most),
            Result("refusals p99 ms", overload.refused_p99, their_overload.accepted_p99, 50, at_most),
            Result(
                "accepted p99 ms 1 s after overload / normal",
                recovery.accepted_p99 / normal.accepted_p99,
                1,
                1.5,
                at_most,
            ),
            Result("refused 1 s after overload", recovery.refused + recovery.failed, 1, 0, at_most),
            Result("memory in overload / before", growth, their_growth, 1.2, at_most),
            Result("seconds until it answers after kill -9", back_s, 3, 3, at_most),
            Result("wrong answers under kill -9", wrong, 1, 0, at_most),
        ],
    )


class Server(NamedTuple):
    """A server under load, and the files of the generator."""

    port: int
    token: str
    bodies: Path
    output: Path

    @contextmanager
    def load(self, *phases: tuple[float, float]) -> Iterator[list[Answer]]:
        """Send requests at so many a second for so many seconds each; the list is filled at the end."""
        words = [f"{rate:.1f}:{seconds}" for rate, seconds in phases]
        command = [
            sys.executable,
            PARTS / "open_loop.py",
            str(self.port),
            self.token,
            self.bodies,
            self.output,
        ]
        found: list[Answer] = []
        with subprocess.Popen([*command, *words], env=environment()) as generator:
            yield found
            if generator.wait(sum(seconds for _, seconds in phases) + 60):
                raise RuntimeError("the load generator failed")
        found += [Answer(*each) for each in json.loads(self.output.read_text())]


def capacities(*servers: tuple[int, int, str]) -> list[float]:
    """Return how many requests a second each server answers to clients that wait, measured in turns."""
    return [measured(rounds)["rate"] for rounds in alternate(CLIENTS, *servers)]


def overloaded(
    server: Server, pid: int, capacity: float, seconds: float
) -> tuple[Phase, Phase, Phase, float]:
    """Return what was seen before, during and after overload, and by what factor the server's memory grew."""
    normal = NORMAL * capacity
    with server.load((normal, WARM_UP_S)):  # what a server in use needs is not growth
        pass
    with (
        MemoryWatch(pid) as memory,
        server.load((normal, NORMAL_S), (OVERLOAD * capacity, seconds), (normal, NORMAL_S)) as seen,
    ):
        pass
    ends = NORMAL_S + seconds
    phases = (
        phase(seen, 0, NORMAL_S),
        phase(seen, NORMAL_S, ends),
        phase(seen, ends + RECOVERED_S, ends + NORMAL_S),
    )
    for name, each in zip(("normal", "overload", "recovery"), phases, strict=True):
        say(
            f"{name}: {each.goodput:,.0f} requests/s accepted, p99 {each.accepted_p99:.1f} ms; {each.refused} refused, "
            f"p99 {each.refused_p99:.1f} ms; {each.failed} failed"
        )
    say(f"memory {memory.before / 2**20:.0f} MiB, at most {memory.most / 2**20:.0f} MiB")
    return *phases, memory.most / memory.before


def phase(seen: Sequence[Answer], since: float, until: float) -> Phase:
    own = [each for each in seen if since <= each.at < until]
    accepted = [each.latency for each in own if each.status == 200]
    refused = [each.latency for each in own if each.status in (429, 503)]
    return Phase(
        p99_ms(accepted),
        p99_ms(refused),
        len(accepted) / (until - since),
        len(refused),
        len(own) - len(accepted) - len(refused),
    )


def p99_ms(latencies: Sequence[float]) -> float:
    found = sorted(latencies)
    return 1e3 * found[len(found) * 99 // 100] if found else 0.0


def killed(server: Server, pid: int, capacity: float) -> tuple[float, int]:
    """Kill the model server under load; return how long nothing was answered, and the number of wrong answers."""
    with server.load((NORMAL * capacity, 3 * KILL_S)) as seen:
        time.sleep(KILL_AT_S)
        os.kill(pid, signal.SIGKILL)
    right = sorted(each.at + each.latency for each in seen if each.status == 200)
    gaps = [b - a for a, b in pairwise(right)]
    wrong = sum(not each.is_right for each in seen)
    say(f"killed: nothing was answered for {max(gaps):.2f} s; {wrong} wrong answers of {len(right)}")
    return max(gaps), wrong


class MemoryWatch:
    """The largest resident memory of a process tree, and what it was at first, in bytes."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.before = self.most = _resident_bytes(pid)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.2):
            self.most = max(self.most, _resident_bytes(self._pid))


def _resident_bytes(pid: int) -> int:
    total = 0
    for each in process_tree(pid):
        try:
            total += int(Path(f"/proc/{each}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            continue
    return total


def save_model_b(path: Path) -> Path:
    """Write the model: convolutions, whose cost grows with the rows, so that batches gain nothing."""
    random = np.random.default_rng(0)

    def weights(name: str, *shape: int) -> onnx.TensorProto:
        fan_in = np.prod(shape[1:]) if len(shape) > 2 else shape[0]
        return numpy_helper.from_array(
            (random.standard_normal(shape) / np.sqrt(fan_in)).astype(np.float32), name
        )

    stored = [weights("w", 32, CHANNELS * SIDE * SIDE), weights("v", CHANNELS, 1)]
    stored.append(numpy_helper.from_array(np.array([-1, CHANNELS, SIDE, SIDE]), "shape"))
    nodes = [helper.make_node("MatMul", ["x", "w"], ["g"])]
    nodes.append(helper.make_node("Reshape", ["g", "shape"], ["c0"]))
    for n in range(LAYERS):
        stored.append(weights(f"k{n}", CHANNELS, CHANNELS, 3, 3))
        nodes.append(helper.make_node("Conv", [f"c{n}", f"k{n}"], [f"d{n}"], pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Relu", [f"d{n}"], [f"c{n + 1}"]))
    nodes.append(helper.make_node("GlobalMaxPool", [f"c{LAYERS}"], ["m"]))
    nodes.append(helper.make_node("Flatten", ["m"], ["f"]))
    nodes.append(helper.make_node("MatMul", ["f", "v"], ["y"]))
    ends = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width])]
        for name, width in (("x", 32), ("y", 1))
    ]
    graph = helper.make_graph(nodes, "b", *ends, stored)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def save_bodies(path: Path, model: Path) -> Path:
    """Write rows and what the model says about them."""
    random = np.random.default_rng(1)
    rows = random.standard_normal((BODIES, 32)).round(4).astype(np.float32)
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    expected = [float(session.run(None, {"x": row[None]})[0][0, 0]) for row in rows]
    values = [[round(float(value), 4) for value in row] for row in rows]
    path.write_text(json.dumps(list(zip(values, expected, strict=True))))
    return path


if __name__ == "__main__":
    main()
