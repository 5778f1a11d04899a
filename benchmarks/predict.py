"""Batch prediction of Parquet rows with a boosted tree and a network, against pyarrow and ONNX Runtime by hand.

    python benchmarks/predict.py --rows 1000000

Both sides are processes that start, read one file of 20 float columns, use all cores, and write the id and the score of
each row. The peer runs with threads and with processes, and with several sizes of batches: the fastest counts. Then
Falaj's run is killed three times with SIGKILL, and what it wrote in the end is compared row by row.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from falaj.assembly.prediction.local_files import predict_files
from falaj.records.control.predictions import PredictionProgress, PredictionRun
from falaj.records.registry import TensorSpec
from harness import Result, Rule, environment, process_tree, pss_kib, report, say

FEATURES = 20
NAMES = tuple(f"f{number}" for number in range(FEATURES))
GROUP_ROWS = 1 << 17
ROUNDS = 3
KILLS = 3
PEER = Path(__file__).parent / "peers" / "arrow_onnx.py"
PEER_WAYS = [("threads", 4096), ("threads", 16_384), ("processes", 4096), ("processes", 16_384)]


class Timing(NamedTuple):
    seconds: float
    cpu_seconds: float


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--model", choices=[*MODELS], action="append", help="one of both alone")
    parser.add_argument("--run", nargs=3, metavar=("MODEL", "IN", "OUT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        predict(*map(Path, given.run))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        source = write_rows(folder / "in.parquet", given.rows)
        results = []
        for model in given.model or MODELS:
            results += measure(folder, source, model, MODELS[model](folder / "model.onnx"), given.rows)
        results += [survive_kills(folder, source, folder / "model.onnx", given.rows)]
        report("predict", results)


def measure(folder: Path, source: Path, name: str, model: Path, rows: int) -> list[Result]:
    """Return throughput, CPU time and memory of both sides."""
    peers = {way: peer_run(folder, source, model, way) for way in PEER_WAYS}
    fastest = min(peers, key=lambda way: peers[way].seconds)
    say(
        f"{name}: the peer is fastest with {fastest[1]} rows and {fastest[0]}: {peers[fastest].seconds:.1f} s"
    )
    ours, theirs = [], [peers[fastest]]
    sampler = MemorySampler()
    for number in range(ROUNDS):
        with sampler:
            ours.append(timed(lambda: predict(model, source, folder / "out.parquet", sampler.follow)))
        say(f"{name}: {rows / ours[-1].seconds:,.0f} rows/s, {ours[-1].cpu_seconds:.1f} CPU s")
        if number:
            theirs.append(peer_run(folder, source, model, fastest))
    require_same(folder / "out.parquet", folder / "peer", rows)
    early, late = sampler.halves()
    return [
        Result(
            f"{name}, rows/s",
            rows / median(each.seconds for each in ours),
            rows / median(each.seconds for each in theirs),
            0.9,
            Rule.RATIO_AT_LEAST,
        ),
        Result(
            f"{name}, CPU s",
            median(each.cpu_seconds for each in ours),
            median(each.cpu_seconds for each in theirs),
            1.1,
        ),
        Result(f"{name}, peak MB of the second half / of the first", late, early, 1.2),
    ]


def ignore(_: PredictionProgress) -> None:
    """Show no progress."""


def predict(
    model: Path, source: Path, output: Path, follow: Callable[[PredictionProgress], None] = ignore
) -> float:
    """Predict as `falaj predict` does once it has the model's bytes; return the CPU seconds of its process."""
    content = model.read_bytes()
    run = PredictionRun(
        model="bench@1",
        file="model.onnx",
        sha256=hashlib.sha256(content).hexdigest(),
        tensors=(TensorSpec(name="X", dtype="float32", shape=(-1, FEATURES), features=NAMES),),
        source=str(source),
    )
    return predict_files(run, [content], output, overwrite=True, report=follow).cpu_seconds


def peer_run(folder: Path, source: Path, model: Path, way: tuple[str, int]) -> Timing:
    output = folder / "peer"
    remove(output)
    command = [sys.executable, str(PEER), str(model), str(source), str(output), way[0], str(way[1])]

    def run() -> None:
        subprocess.run(command, check=True, env=environment())

    return timed(run)


def timed(work: Callable[[], float | None]) -> Timing:
    """Time `work`, which returns the CPU seconds of processes that the system does not count as children's."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    sandboxed_s = work() or 0.0
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Timing(seconds, spent_s + sandboxed_s)


class MemorySampler:
    """Samples the memory of this process's children while a block runs, and how far the run is."""

    def __init__(self) -> None:
        self._runs: list[list[tuple[float, float]]] = []

    def follow(self, far: PredictionProgress) -> None:
        self._share = far.rows / far.total

    def __enter__(self) -> None:
        self._samples: list[tuple[float, float]] = []
        self._share = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._runs.append(self._samples)

    def halves(self) -> tuple[float, float]:
        """Return the median peaks in MB while the first and the second half of the rows are done."""
        early = [max((size for share, size in run if share <= 0.5), default=1.0) for run in self._runs]
        late = [max((size for share, size in run if share > 0.5), default=1.0) for run in self._runs]
        return median(early), median(late)

    def _sample(self) -> None:
        while not self._stop.wait(0.05):
            children = process_tree(os.getpid())[1:]
            self._samples.append((self._share, sum(pss_kib(pid) for pid in children) * 1024 / 1e6))


def survive_kills(folder: Path, source: Path, model: Path, rows: int) -> Result:
    """Kill runs with SIGKILL, let the last one finish, and count the rows that are as without a kill."""
    whole, output = folder / "out.parquet", folder / "resumed.parquet"
    began = time.perf_counter()
    predict(model, source, whole)
    usual_s = time.perf_counter() - began
    command = [sys.executable, __file__, "--run", str(model), str(source), str(output)]
    randomness = random.Random(7)
    for _ in range(KILLS):
        with subprocess.Popen(command, env=environment()) as process:
            time.sleep(randomness.uniform(0.2, 0.9) * usual_s)
            process.send_signal(signal.SIGKILL)
        say(f"killed; the output is {'there' if output.exists() else 'not there yet'}")
    subprocess.run(command, check=True, env=environment())
    resumed, expected = pq.read_table(output), pq.read_table(whole)
    same = resumed.num_rows == rows and resumed.equals(expected)
    right = rows if same else int(np.isin(expected["id"].to_numpy(), resumed["id"].to_numpy()).sum()) - 1
    return Result(f"rows that are right after {KILLS} kills", right, rows, 1.0, Rule.RATIO_AT_LEAST)


def require_same(ours: Path, peer: Path, rows: int) -> None:
    """Raise unless both sides wrote the same scores."""
    made, theirs = pq.read_table(ours), pq.read_table(peer).sort_by("id")
    if made.num_rows != rows or not np.array_equal(made["id"].to_numpy(), np.arange(rows)):
        raise AssertionError("rows are missing, repeated or out of order")
    if not np.allclose(made["score"].to_numpy(), theirs["score"].to_numpy(), atol=1e-5):
        raise AssertionError("the two sides predict differently")


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------ rows and models


def write_rows(path: Path, rows: int) -> Path:
    say(f"writing {rows:,} rows")
    schema = pa.schema([("id", pa.int64()), *((name, pa.float32()) for name in NAMES)])
    randomness = np.random.default_rng(7)
    with pq.ParquetWriter(path, schema, use_dictionary=False) as writer:
        for first in range(0, rows, GROUP_ROWS):
            count = min(GROUP_ROWS, rows - first)
            columns = randomness.standard_normal((FEATURES, count), np.float32)
            writer.write_table(pa.table([np.arange(first, first + count), *columns], schema=schema))
    return path


def save_tree(path: Path) -> Path:
    """Save 100 boosted trees of depth 6 that predict a score."""
    from onnxmltools import convert_xgboost
    from onnxmltools.convert.common.data_types import FloatTensorType
    from xgboost import XGBRegressor

    randomness = np.random.default_rng(7)
    rows = randomness.standard_normal((20_000, FEATURES), np.float32)
    target = rows[:, 0] + rows[:, 1] * rows[:, 2] + randomness.standard_normal(20_000)
    trees = XGBRegressor(n_estimators=100, max_depth=6).fit(rows, target)
    made = convert_xgboost(trees, initial_types=[("X", FloatTensorType([None, FEATURES]))])
    last = made.graph.output[0].name
    for node in made.graph.node:
        node.output[:] = ["score" if name == last else name for name in node.output]
    made.graph.output[0].name = "score"
    path.write_bytes(made.SerializeToString())
    return path


def save_network(path: Path) -> Path:
    """Save a network 20-128-64-1."""
    from onnx import TensorProto, helper, numpy_helper

    randomness, sizes = np.random.default_rng(7), (FEATURES, 128, 64, 1)
    nodes, weights, value = [], [], "X"
    for number, (inside, outside) in enumerate(pairwise(sizes)):
        weight = randomness.standard_normal((inside, outside), np.float32) / np.sqrt(inside)
        weights += [
            numpy_helper.from_array(weight.astype(np.float32), f"w{number}"),
            numpy_helper.from_array(np.zeros(outside, np.float32), f"b{number}"),
        ]
        nodes.append(helper.make_node("Gemm", [value, f"w{number}", f"b{number}"], [f"sum{number}"]))
        last = number == len(sizes) - 2
        value = "score" if last else f"layer{number}"
        nodes.append(helper.make_node("Sigmoid" if last else "Relu", [f"sum{number}"], [value]))
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["rows", FEATURES])],
        [helper.make_tensor_value_info("score", TensorProto.FLOAT, ["rows", 1])],
        weights,
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(made.SerializeToString())
    return path


MODELS = {"boosted tree": save_tree, "network": save_network}

if __name__ == "__main__":
    main()
