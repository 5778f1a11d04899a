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

from falaj.training.runtime.agent.run_files import AppendOnlyFile, ParamsFile, WriteFailures, replace_file
from falaj.training.runtime.checkpointing.storage.folder import CheckpointFolder
from falaj.training.runtime.checkpointing.storage.store import CheckpointStore
from falaj.training.runtime.errors import InvalidTraining, TrainingFault

METRICS, PARAMS, PROGRESS = "metrics.jsonl", "params.json", "progress.json"
RUN_EXAMPLE = 'run="runs/first"'
RESUME_PREFIX = "resumed."
"""How the names of the parameters begin that tell of each time the run went on."""


class MetricValue(NamedTuple):
    """One measured value. The last one that was logged for a step and a name counts."""

    step: int
    name: str
    value: float


class RunHistory(NamedTuple):
    """What the attempts before have left of a run."""

    losses: list[tuple[int, float]]
    """The losses that were logged for the steps after the one that was asked for, in that order; some twice."""
    resumes: list[str]
    """The values of the parameters whose names begin with `RESUME_PREFIX`."""
    unread: Sequence[str] = ()
    """What could not be read of all that, in words."""


class Agent(Protocol):
    """What a run asks of the platform. Calls come from one thread, and return when they have taken effect."""

    def log(self, metrics: Sequence[MetricValue]) -> None: ...

    def params(self, values: Mapping[str, Any]) -> None:
        """Parameters of the run; one that it has keeps its value."""

    def load_history(self, after: int) -> RunHistory:
        """What is known of the run from before, with the losses of the steps after `after`."""

    def progress(self, step: int, total: int) -> None: ...

    def heartbeat(self) -> bool:
        """Say that the run is alive, about once a second; False when it should save and stop."""

    def notify(self, words: str) -> None:
        """A line for people."""

    def checkpoints(self) -> CheckpointStore:
        """Where the run's checkpoints are kept; another thread may use it than the one that calls the rest."""

    def close(self) -> None: ...


class FolderAgent:
    """An agent on a folder: metrics.jsonl, params.json, progress.json, and checkpoints/step-…/.

    What cannot be written is said once, and written as soon as it can be; only checkpoints are more than that.
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
        """Try for the last time to write what is waiting; say what is lost."""
        self.log([])
        self.params({})
        if self._metrics.waiting or self._params.waiting:
            lost = f"{self._metrics.waiting} metrics and {self._params.waiting} parameters"
            self.notify(f"{lost} of this run could not be written to {self._folder}, and are lost")
        self._metrics.close()
        os.close(self._lock)


def run_faults(given: object) -> list[TrainingFault]:
    """What is wrong with the option `run`, before anything is opened."""
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
    """The folder of the checkpoints of the run that is kept in a folder."""
    return Path(run) / "checkpoints"


def read_metrics(folder: str | Path) -> Iterator[MetricValue]:
    """What was logged in `folder`, in that order; a line that was cut by a crash, or makes no sense, is left out."""
    yield from _parsed((Path(folder) / METRICS).read_bytes())[0]


def _parsed(data: bytes) -> tuple[list[MetricValue], int]:
    """The metrics in `data`, and how many lines are none."""
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
    """`value` as JSON has it: NaN and infinity as words that float() understands."""
    return value if math.isfinite(value) else str(value)


def _locked(folder: Path) -> int:
    """A lock that ends with this process, however it ends."""
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise InvalidTraining(
            "another run is using this folder",
            faults=[TrainingFault("run", folder, "a folder of its own for each run", f'run="{folder}-2"')],
        ) from None
    return handle


def _no_place(folder: Path, error: OSError) -> InvalidTraining:
    fault = TrainingFault(
        "run", f"{folder} ({error.strerror})", "a folder that can be written to", RUN_EXAMPLE
    )
    return InvalidTraining("the run cannot be kept there", faults=[fault])
