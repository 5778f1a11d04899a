"""Registering a model of 1 GB, against hashing, encrypting and copying the same bytes.

Falaj uploads the file to its encrypted store and registers it as a version: it is hashed, encrypted, stored with fsync,
scanned for code in a process without keys, signed, and recorded. The peer reads the file, encrypts it by AES-256-GCM
with the same library, and writes it with fsync; it hashes in a thread beside, and allocates nothing in its loop. Both
in one run, in alternation: MB/s by the clock, and CPU seconds of all processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from statistics import median
from typing import BinaryIO

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

import falaj as fj
from harness import Result, Rule, cpu_seconds, report, say

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

QUICK = False
ROUNDS = 4
SIZE_BYTES = 1_000_000_000
CHUNK = 1 << 20
TAG_BYTES, BUFFERS = 16, 4
GOAL = 0.5


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="registry-") as folder:
        results = measure(Path(folder))
    report("registry", results)


def measure(folder: Path) -> list[Result]:
    makers: dict[str, Callable[[Path], None]] = {
        "safetensors": write_safetensors,
        "ONNX": write_onnx,
        "torch export": write_torch_export,
    }
    results = []
    os.environ["XDG_CONFIG_HOME"] = str(folder / "config")
    with fj.open(folder / "home") as platform:
        for name, make in makers.items():
            file = folder / "model"
            make(file)
            plain: list[tuple[float, float]] = []
            ours: list[tuple[float, float]] = []
            for number in range(ROUNDS + 1):
                raw = cost(lambda file=file: copy(file, folder / "copy"))
                (folder / "copy").unlink()
                found = raw, cost(lambda file=file, name=name: register(platform, name, file))
                say(f"{name} {number}: peer {found[0][0]:.2f} s, Falaj {found[1][0]:.2f} s")
                if number:  # the first round is a warm-up
                    plain.append(found[0])
                    ours.append(found[1])
            size_mb = file.stat().st_size / 1e6
            rates = [median(size_mb / wall for wall, _ in each) for each in (ours, plain)]
            cpu = [median(cpu for _, cpu in each) for each in (ours, plain)]
            results.append(Result(f"MB/s, {name} of 1 GB registered", *rates, GOAL, Rule.RATIO_AT_LEAST))
            results.append(Result(f"CPU s, {name} of 1 GB registered", *cpu, 1 / GOAL, Rule.RATIO_AT_MOST))
    return results


def cost(action: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds by the clock, and those of CPUs, of this process and its children."""
    before, started = cpu_seconds(os.getpid()), time.perf_counter()
    action()
    return time.perf_counter() - started, cpu_seconds(os.getpid()) - before


def register(platform: fj.Platform, name: str, file: Path) -> None:
    blob = platform.blobs.upload(chunks(file))
    made = platform.models.register(name.lower().replace(" ", "-"), files=(blob.id,), paths=("model",))
    if made.size_bytes != file.stat().st_size:
        raise RuntimeError(f"{made.size_bytes} bytes were registered")


def copy(file: Path, target: Path) -> None:
    """Hash, encrypt and copy. Buffers go round: one is filled while others are hashed."""
    digest, cipher = hashlib.sha256(), AESGCM(os.urandom(32))
    buffers = [bytearray(CHUNK) for _ in range(BUFFERS)]
    hashing: list[Future[None] | None] = [None] * BUFFERS
    sealed = bytearray(CHUNK + TAG_BYTES)
    with open(file, "rb", buffering=0) as content, open(target, "wb", buffering=0) as copied:
        with ThreadPoolExecutor(1) as beside:
            for number in count():
                turn = number % BUFFERS
                if (before := hashing[turn]) is not None:
                    before.result()
                size = content.readinto(buffers[turn])
                if not size:
                    break
                plain = memoryview(buffers[turn])[:size]
                hashing[turn] = beside.submit(digest.update, plain)
                into = memoryview(sealed)[: size + TAG_BYTES]
                cipher.encrypt_into(number.to_bytes(12, "big"), plain, None, into)
                copied.write(into)
        os.fsync(copied.fileno())


def chunks(file: Path) -> Iterator[bytes]:
    with open(file, "rb") as content:
        while chunk := content.read(CHUNK):
            yield chunk


def write_safetensors(file: Path) -> None:
    header = json.dumps({"w": {"dtype": "U8", "shape": [SIZE_BYTES], "data_offsets": [0, SIZE_BYTES]}})
    with open(file, "wb") as target:
        target.write(struct.pack("<Q", len(header)) + header.encode())
        write_noise(target)


def write_onnx(file: Path) -> None:
    """Write a graph with many initializers, as a transformer has."""
    from model_files import field, onnx

    pieces, size = 200, SIZE_BYTES // 200
    graph = b"".join(field(5, field(9, os.urandom(size))) for _ in range(pieces))
    file.write_bytes(onnx(graph))


def write_torch_export(file: Path) -> None:
    from model_files import PLAIN_WEIGHTS, torch_program

    with zipfile.ZipFile(file, "w") as archive:
        for number in range(200):
            archive.writestr(f"m/data/weights/weight_{number}", os.urandom(SIZE_BYTES // 200))
        archive.writestr("m/data/weights/model_weights_config.json", PLAIN_WEIGHTS)
        archive.writestr("m/models/model.json", torch_program())
        archive.writestr("m/archive_format", b"pt2")


def write_noise(target: BinaryIO) -> None:
    left = SIZE_BYTES
    while left:
        size = min(left, CHUNK)
        target.write(os.urandom(size))
        left -= size


if __name__ == "__main__":
    main()
