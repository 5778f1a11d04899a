"""`fj.job`: the inputs, outputs and logging of a job's script. Standard library only.

    import falaj as fj
    rows = pandas.read_parquet(fj.job.inputs["flights"])
    fj.job.params(lr=0.01)
    fj.job.log(step=1, loss=0.5)
    fj.job.progress(1, 100)
    model.save(fj.job.outputs / "model.onnx")

Without a platform the same script uses the folders ./inputs and ./outputs, and prints what it logs.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from falaj.training.runtime.agent.agents import MetricValue
from falaj.training.runtime.agent.heartbeat import beat_for_job
from falaj.training.runtime.agent.protocol import SocketAgent, platform_agent
from falaj.training.runtime.errors import InvalidTraining, TrainingFault

SEND_EVERY_S = 1.0
SEND_AT = 500
"""Metrics are sent in groups: once a second, at this number, and at the end."""


class JobInputs(Mapping[str, Path]):
    """The inputs by their names in the job: each a file, or a folder of files."""

    def __init__(self, folder: Path, *, what: str = "input", option: str = "--dataset {}=REFERENCE") -> None:
        self._folder, self._what, self._option = folder, what, option

    def __getitem__(self, name: str) -> Path:
        whole = self._folder / name
        found = whole if whole.exists() else self._found().get(name)
        if found is None:
            known = ", ".join(self._found()) or "none"
            fix = f"falaj train … {self._option.format(name)}"
            fault = TrainingFault(f"{self._what}s[{name!r}]", allowed=known, fix=fix)
            raise InvalidTraining(f"there is no {self._what} {name!r} in {self._folder}", faults=[fault])
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found())

    def __len__(self) -> int:
        return len(self._found())

    def _found(self) -> dict[str, Path]:
        """Return the inputs by name; a file without its suffix."""
        paths = sorted(self._folder.iterdir()) if self._folder.is_dir() else []
        return {path.name if path.is_dir() else path.stem: path for path in paths}


class JobContext:
    """The job of this process, or a stand-in without a platform."""

    def __init__(self) -> None:
        self._agent: SocketAgent | None = None
        self._is_open = False
        self._unsent: list[MetricValue] = []
        self._sent_at = time.monotonic()
        self._told_at = float("-inf")

    @property
    def id(self) -> str | None:
        """The id of the job; None outside a job."""
        return os.environ.get("FALAJ_JOB")

    @property
    def attempt(self) -> int:
        """The number of this attempt at the job, from 1."""
        return int(os.environ.get("FALAJ_ATTEMPT", "1"))

    @property
    def inputs(self) -> JobInputs:
        """The inputs by their names in the job, each a path."""
        return JobInputs(Path(os.environ.get("FALAJ_INPUTS", "inputs")))

    @property
    def volumes(self) -> JobInputs:
        """The volumes that the job asked for, by their names, each a folder."""
        folder = Path(os.environ.get("FALAJ_VOLUMES", "volumes"))
        return JobInputs(folder, what="volume", option="--volume {}")

    @property
    def outputs(self) -> Path:
        """The folder whose files become artifacts of the run when the job succeeds."""
        folder = Path(os.environ.get("FALAJ_OUTPUTS", "outputs"))
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def log(self, *, step: int = 0, **metrics: float) -> None:
        """Log metrics of a step."""
        new = [MetricValue(step, name, float(value)) for name, value in metrics.items()]
        if self._connected() is None:
            words = " ".join(f"{metric.name}={metric.value:g}" for metric in new)
            print(f"step {step}: {words}", file=sys.stderr, flush=True)
            return
        beat_for_job()
        self._unsent += new
        if len(self._unsent) >= SEND_AT or time.monotonic() - self._sent_at >= SEND_EVERY_S:
            self.flush()

    def progress(self, step: int, total: int) -> None:
        """Report that `step` of `total` steps are done, from which the remaining time is estimated."""
        agent, is_last = self._connected(), step >= total > 0
        if agent is None:
            return
        beat_for_job()
        if is_last or time.monotonic() - self._told_at >= SEND_EVERY_S:
            self._told_at = time.monotonic()
            self.flush()
            agent.progress(int(step), int(total))

    def params(self, **values: Any) -> None:
        """Record parameters of the run; an existing one keeps its value."""
        agent = self._connected()
        if agent is None:
            print("params: " + " ".join(f"{k}={v}" for k, v in values.items()), file=sys.stderr, flush=True)
        else:
            agent.params(values)

    def flush(self) -> None:
        """Send pending metrics now; they are sent at the end in any case."""
        agent, unsent = self._connected(), self._unsent
        self._unsent, self._sent_at = [], time.monotonic()
        if agent is not None and unsent:
            agent.log(unsent)

    def _connected(self) -> SocketAgent | None:
        if not self._is_open:
            self._is_open = True
            self._agent = platform_agent()
            if self._agent is not None:
                atexit.register(self.flush)
        return self._agent


job = JobContext()
"""The job of this process: `fj.job`."""
