"""Batch prediction by hand: pyarrow batches through ONNX Runtime on all cores, in order into one Parquet file.

    python arrow_onnx.py MODEL IN OUT threads|processes BATCH_ROWS

Threads share one session that has one thread for a run, because ONNX Runtime and pyarrow release the GIL; the main
thread reads ahead and writes. Processes take row groups in turn, and write a file each.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import numpy as np
import onnxruntime as ort
import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = pa.schema([("id", pa.int64()), ("score", pa.float32())])


def open_session(model: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def predict(session: ort.InferenceSession, batch: Any, names: list[str]) -> Any:
    matrix = np.column_stack([batch.column(name).to_numpy() for name in names])
    (scores,) = session.run(["score"], {"X": matrix})
    return pa.record_batch([batch.column("id"), pa.array(scores[:, 0])], schema=SCHEMA)


def with_threads(model: str, source: str, output: str, batch_rows: int) -> None:
    session, threads = open_session(model), os.cpu_count() or 1
    file = pq.ParquetFile(source)
    names = [name for name in file.schema_arrow.names if name != "id"]
    running: deque[Future[Any]] = deque()
    ready: list[Any] = []
    with ThreadPoolExecutor(threads) as pool, pq.ParquetWriter(output, SCHEMA) as writer:

        def write(future: Future[Any]) -> None:
            ready.append(future.result())
            if sum(batch.num_rows for batch in ready) >= 1 << 17:
                writer.write_table(pa.Table.from_batches(ready))
                ready.clear()

        for batch in file.iter_batches(batch_rows):
            running.append(pool.submit(predict, session, batch, names))
            if len(running) > 4 * threads:
                write(running.popleft())
        for future in running:
            write(future)
        if ready:
            writer.write_table(pa.Table.from_batches(ready))


def with_processes(model: str, source: str, output: str, batch_rows: int) -> None:
    shares = os.cpu_count() or 1
    Path(output).mkdir()
    with ProcessPoolExecutor(shares) as pool:
        shared = [
            pool.submit(predict_share, model, source, output, batch_rows, n, shares) for n in range(shares)
        ]
        for future in shared:
            future.result()


def predict_share(model: str, source: str, output: str, batch_rows: int, number: int, shares: int) -> None:
    session, file = open_session(model), pq.ParquetFile(source)
    names = [name for name in file.schema_arrow.names if name != "id"]
    with pq.ParquetWriter(f"{output}/{number}.parquet", SCHEMA) as writer:
        for group in range(number, file.num_row_groups, shares):
            batches = file.iter_batches(batch_rows, row_groups=[group], use_threads=False)
            done = [predict(session, batch, names) for batch in batches]
            writer.write_table(pa.Table.from_batches(done))


if __name__ == "__main__":
    how = with_threads if sys.argv[4] == "threads" else with_processes
    how(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[5]))
