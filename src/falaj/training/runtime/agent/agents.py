"""The interface between a run and the platform: an agent process beside the run, or a folder without a platform."""

from __future__ import annotations

import fcntl
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from falaj.training.runtime.agent.run_files import AppendOnlyFile, ParamsFile, WriteFailures, replace_file
from falaj.training.runtime.checkpointing.storage.folder import CheckpointFolder
from falaj.training.runtime.checkpointing.storage.store import CheckpointStore
from falaj.training.runtime.errors import InvalidTraining, TrainingFault

METRICS, PARAMS, PROGRESS = "metrics.jsonl", "params.json", "progress.json"
RUN_EXAMPLE = 'run="runs/first"'
RESUME_PREFIX = "resumed."
"""Prefix of the parameters that record each resume of the run."""


class MetricValue(NamedTuple):
    """One measured value. The last value logged for a step and a name counts."""

    step: int
    name: str
    value: float


class RunHistory(NamedTuple):
    """The records of earlier attempts at a run."""

    losses: list[tuple[int, float]]
    """The logged losses of the steps after the requested one, in the order of logging; some steps appear twice."""
    resumes: list[str]
    """The values of the parameters whose names start with `RESUME_PREFIX`."""
    unread: Sequence[str] = ()
    """Descriptions of what could not be read."""


class Agent(Protocol):
    """The calls of a run to the platform. They come from one thread, and return when they have taken effect."""

    def log(self, metrics: Sequence[MetricValue]) -> None: ...

    def params(self, values: Mapping[str, Any]) -> None:
        """Record parameters of the run; an existing one keeps its value."""

    def load_history(self, after: int) -> RunHistory:
        """Return the records of earlier attempts, with the losses of the steps after `after`."""

    def progress(self, step: int, total: int) -> None: ...

    def heartbeat(self) -> bool:
        """Report that the run is alive, about once a second; return False when it should save and stop."""

    def notify(self, words: str) -> None:
        """Show a line to the user."""

    def checkpoints(self) -> CheckpointStore:
        """Return the checkpoint store of the run; another thread than that of the other calls may use it."""

    def close(self) -> None: ...


class FolderAgent:
    """An agent on a folder: metrics.jsonl, params.json, progress.json, and checkpoints/step-…/.

    A failed write is reported once and retried with the next one; only a checkpoint that cannot be written is an error.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        try:
            checkpoint_folder(self._folder).mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self._folder)
            self._metrics = AppendOnlyFile(self._folder / METRICS)
        except OSError as error:
            raise _no_place(self._folder, error) from error
        self._params, self._trouble = ParamsFile(self._folder / PARAMS), WriteFailures(self.notify)

    def log(self, metrics: Sequence[MetricValue]) -> None:
        lines = (json.dumps([m.step, m.name, json_float(m.value)]) for m in metrics)
        text = "".join(f"{line}\n" for line in lines).encode()
        self._trouble.attempt(METRICS, lambda: self._metrics.append(text))

    def params(self, values: Mapping[str, Any]) -> None:
        shown = {str(name): str(value) for name, value in values.items()}
        self._trouble.attempt(PARAMS, lambda: self._params.add(shown))

    def load_history(self, after: int) -> RunHistory:
        unread = []
        metrics, bad_lines = _parsed((self._folder / METRICS).read_bytes())
        if bad_lines:
            unread.append(f"{bad_lines} line{'s' if bad_lines > 1 else ''} of {METRICS}")
        if self._params.was_damaged:
            unread.append(PARAMS)
        logged = [(m.step, m.value) for m in metrics if m.name == "loss" and m.step > after]
        resumes = [value for name, value in self._params.read().items() if name.startswith(RESUME_PREFIX)]
        return RunHistory(logged, resumes, tuple(unread))

    def progress(self, step: int, total: int) -> None:
        text = json.dumps({"step": step, "total": total}).encode()
        self._trouble.attempt(PROGRESS, lambda: replace_file(self._folder / PROGRESS, text))
        if self._params.waiting:
            self.params({})

    def heartbeat(self) -> bool:
        return True

    def notify(self, words: str) -> None:
        print(words, file=sys.stderr, flush=True)

    def checkpoints(self) -> CheckpointStore:
        return CheckpointFolder(checkpoint_folder(self._folder))

    def close(self) -> None:
        """Write pending metrics and parameters a last time; report what is lost."""
        self.log([])
        self.params({})
        if self._metrics.waiting or self._params.waiting:
            lost = f"{self._metrics.waiting} metrics and {self._params.waiting} parameters"
            self.notify(f"{lost} of this run could not be written to {self._folder}, and are lost")
        self._metrics.close()
        os.close(self._lock)


def run_faults(given: object) -> list[TrainingFault]:
    """Return the faults of the option `run`, before anything is opened."""
    if given is None or isinstance(given, Path) or (isinstance(given, str) and given):
        return []
    calls = ("log", "params", "load_history", "progress", "heartbeat", "notify", "checkpoints")
    missing = [name for name in calls if not callable(getattr(given, name, None))]
    if not missing:
        return []
    shown = (
        f"{type(given).__name__} without {', '.join(missing)}" if len(missing) < len(calls) else repr(given)
    )
    return [TrainingFault("run", shown, "a folder, or an agent", RUN_EXAMPLE)]


def checkpoint_folder(run: str | Path) -> Path:
    """Return the checkpoint folder of a run that is stored in a folder."""
    return Path(run) / "checkpoints"


def read_metrics(folder: str | Path) -> Iterator[MetricValue]:
    """Yield the metrics logged in `folder`, in order; incomplete or invalid lines are skipped."""
    yield from _parsed((Path(folder) / METRICS).read_bytes())[0]


def _parsed(data: bytes) -> tuple[list[MetricValue], int]:
    """Return the metrics in `data`, and the number of invalid lines."""
    lines = [line for line in data.split(b"\n") if line]
    found = [metric for metric in map(_metric_in, lines) if metric is not None]
    return found, len(lines) - len(found)


def _metric_in(line: bytes) -> MetricValue | None:
    try:
        match json.loads(line):
            case [int(step), str(name), int() | float() | str() as value]:
                return MetricValue(step, name, float(value))
    except (ValueError, RecursionError):
        pass
    return None


def json_float(value: float) -> float | str:
    """Return `value` for JSON: NaN and infinity as strings that float() parses."""
    return value if math.isfinite(value) else str(value)


def _locked(folder: Path) -> int:
    """Lock `folder` until this process ends, however it ends."""
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise InvalidTraining(
            "another run is using this folder",
            faults=[TrainingFault("run", folder, "a separate folder for each run", f'run="{folder}-2"')],
        ) from None
    return handle


def _no_place(folder: Path, error: OSError) -> InvalidTraining:
    fault = TrainingFault(
        "run", f"{folder} ({error.strerror})", "a folder that can be written to", RUN_EXAMPLE
    )
    return InvalidTraining("the run folder cannot be used", faults=[fault])
