"""The boundary between a run and the platform: a small agent beside it, or a folder where there is none."""

from __future__ import annotations

import fcntl
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from falaj.training.runtime.checkpoint.folder import CheckpointFolder
from falaj.training.runtime.checkpoint.store import CheckpointStore
from falaj.training.runtime.errors import Fault, InvalidTraining

RESUMED = "resumed."
"""How the names of the parameters begin that tell of each time the run went on."""


class Metric(NamedTuple):
    """One measured value. The last one that was logged for a step and a name counts."""

    step: int
    name: str
    value: float


class Past(NamedTuple):
    """What the attempts before have left of a run."""

    losses: list[tuple[int, float]]
    """The losses that were logged for the steps after the one that was asked for, in that order; some twice."""
    resumes: list[str]
    """The values of the parameters whose names begin with `RESUMED`."""


class Agent(Protocol):
    """What a run asks of the platform. Calls come from one thread, and return when they have taken effect."""

    def log(self, metrics: Sequence[Metric]) -> None: ...

    def params(self, values: Mapping[str, Any]) -> None:
        """Parameters of the run; one that it has keeps its value."""

    def recall(self, after: int) -> Past:
        """What is known of the run from before, with the losses of the steps after `after`."""

    def progress(self, step: int, total: int) -> None: ...

    def heartbeat(self) -> bool:
        """Say that the run is alive, about once a second; False when it should save and stop."""

    def say(self, words: str) -> None:
        """A line for people."""

    def checkpoints(self) -> CheckpointStore:
        """Where the run's checkpoints are kept; another thread may use it than the one that calls the rest."""

    def close(self) -> None: ...


class LocalAgent:
    """An agent on a folder: metrics.jsonl, params.json, progress.json, and checkpoints/step-…/."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        checkpoints_of(self._folder).mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self._folder)
        self._metrics = os.open(self._folder / "metrics.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        _end_last_line(self._metrics)

    def log(self, metrics: Sequence[Metric]) -> None:
        lines = (json.dumps([m.step, m.name, plain(m.value)]) for m in metrics)
        os.write(self._metrics, "".join(f"{line}\n" for line in lines).encode())

    def params(self, values: Mapping[str, Any]) -> None:
        shown = {str(name): str(value) for name, value in values.items()}
        _replace(self._folder / "params.json", json.dumps(shown | self._known_params()).encode())

    def recall(self, after: int) -> Past:
        logged = (m for m in read_metrics(self._folder) if m.name == "loss" and m.step > after)
        resumes = [value for name, value in self._known_params().items() if name.startswith(RESUMED)]
        return Past([(m.step, m.value) for m in logged], resumes)

    def _known_params(self) -> dict[str, str]:
        path = self._folder / "params.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def progress(self, step: int, total: int) -> None:
        text = json.dumps({"step": step, "total": total}).encode()
        _replace(self._folder / "progress.json", text)

    def heartbeat(self) -> bool:
        return True

    def say(self, words: str) -> None:
        print(words, file=sys.stderr, flush=True)

    def checkpoints(self) -> CheckpointStore:
        return CheckpointFolder(checkpoints_of(self._folder))

    def close(self) -> None:
        os.close(self._metrics)
        os.close(self._lock)


def checkpoints_of(run: str | Path) -> Path:
    """The folder of the checkpoints of the run that is kept in a folder."""
    return Path(run) / "checkpoints"


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


def _replace(path: Path, data: bytes) -> None:
    """Write aside, then rename: a reader sees the old bytes or the new ones."""
    aside = path.with_name(f".{path.name}.part")
    aside.write_bytes(data)
    aside.replace(path)


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
