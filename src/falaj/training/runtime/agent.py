"""The boundary between a run and the platform: a small agent beside it, or a folder where there is none."""

from __future__ import annotations

import fcntl
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

from falaj.training.runtime.errors import CheckpointDamaged, Fault, InvalidTraining

Part: TypeAlias = bytes | memoryview


class Metric(NamedTuple):
    """One measured value. The last one that was logged for a step and a name counts."""

    step: int
    name: str
    value: float


class Agent(Protocol):
    """What a run asks of the platform. Calls come from one thread, and return when they have taken effect."""

    def log(self, metrics: Sequence[Metric]) -> None: ...

    def params(self, values: Mapping[str, Any]) -> None:
        """Parameters of the run; one that it has keeps its value."""

    def progress(self, step: int, total: int) -> None: ...

    def heartbeat(self) -> bool:
        """Say that the run is alive, about once a second; False when it should save and stop."""

    def say(self, words: str) -> None:
        """A line for people."""

    def save_checkpoint(self, step: int, parts: Sequence[Part]) -> None:
        """Keep these bytes, durable on return, all or nothing."""

    def checkpoint_steps(self) -> list[int]:
        """The steps that have a checkpoint, newest first."""

    def load_checkpoint(self, step: int) -> bytearray:
        """The bytes as they lie there; the run verifies them. CheckpointDamaged if they cannot be read."""

    def close(self) -> None: ...


class LocalAgent:
    """An agent on a folder: metrics.jsonl, params.json, progress.json; checkpoints/step-….ckpt, `keep` of them."""

    def __init__(self, folder: str | Path, *, keep: int = 3) -> None:
        self._folder, self._keep = Path(folder), keep
        self._checkpoints = self._folder / "checkpoints"
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self._folder)
        self._metrics = os.open(self._folder / "metrics.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        _end_last_line(self._metrics)

    def log(self, metrics: Sequence[Metric]) -> None:
        lines = (json.dumps([m.step, m.name, plain(m.value)]) for m in metrics)
        os.write(self._metrics, "".join(f"{line}\n" for line in lines).encode())

    def params(self, values: Mapping[str, Any]) -> None:
        path = self._folder / "params.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        shown = {str(name): str(value) for name, value in values.items()}
        _replace(path, [json.dumps(shown | known).encode()], durable=False)

    def progress(self, step: int, total: int) -> None:
        text = json.dumps({"step": step, "total": total}).encode()
        _replace(self._folder / "progress.json", [text], durable=False)

    def heartbeat(self) -> bool:
        return True

    def say(self, words: str) -> None:
        print(words, file=sys.stderr, flush=True)

    def save_checkpoint(self, step: int, parts: Sequence[Part]) -> None:
        _replace(self._path(step), parts, durable=True)
        for old in self.checkpoint_steps()[self._keep :]:
            self._path(old).unlink(missing_ok=True)

    def checkpoint_steps(self) -> list[int]:
        steps = (path.stem.removeprefix("step-") for path in self._checkpoints.glob("step-*.ckpt"))
        return sorted((int(step) for step in steps if step.isdigit()), reverse=True)

    def load_checkpoint(self, step: int) -> bytearray:
        try:
            with self._path(step).open("rb") as file:
                data = bytearray(os.fstat(file.fileno()).st_size)
                file.readinto(data)
        except OSError as error:
            raise CheckpointDamaged(f"it cannot be read: {error}") from error
        return data

    def close(self) -> None:
        os.close(self._metrics)
        os.close(self._lock)

    def _path(self, step: int) -> Path:
        return self._checkpoints / f"step-{step:010}.ckpt"


def read_metrics(folder: str | Path) -> Iterator[Metric]:
    """What was logged in `folder`, in that order; a line that was cut by a crash is left out."""
    for line in (Path(folder) / "metrics.jsonl").read_text().splitlines():
        try:
            step, name, value = json.loads(line)
        except ValueError:
            continue
        yield Metric(step, name, float(value))


def plain(value: float) -> float | str:
    """`value` as JSON has it: NaN and infinity as words that float() understands."""
    return value if math.isfinite(value) else str(value)


def _replace(path: Path, parts: Sequence[Part], *, durable: bool) -> None:
    """Write aside, then rename: a reader sees the old bytes or the new ones. `durable`: also after a power cut."""
    aside = path.with_name(f".{path.name}.part")
    with aside.open("wb") as file:
        for part in parts:
            file.write(part)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    aside.replace(path)
    if durable:
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _locked(folder: Path) -> int:
    """A lock that ends with this process, however it ends."""
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise InvalidTraining(
            "another run is using this folder",
            faults=[Fault("run", folder, "a folder of its own for each run")],
        ) from None
    return handle


def _end_last_line(handle: int) -> None:
    """A crash may have cut the last line: what comes next must not be appended to it."""
    size = os.fstat(handle).st_size
    if size and os.pread(handle, 1, size - 1) != b"\n":
        os.write(handle, b"\n")
