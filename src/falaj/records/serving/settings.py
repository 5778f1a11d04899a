"""How the versions of an endpoint run: what an operator sets, and what is measured when they are loaded."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from falaj.records.names import Name
from falaj.records.record import Record

RowCount = Annotated[int, Field(ge=1, le=4096)]
RunCount = Annotated[int, Field(ge=1, le=64)]
DelayMs = Annotated[float, Field(ge=0, le=1000)]
QueueMs = Annotated[float, Field(ge=1, le=600_000)]
TimeoutMs = Annotated[float, Field(ge=1, le=600_000)]
RequestRate = Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)]
BurstSize = Annotated[int, Field(ge=1, le=1_000_000)]
Device = Literal["auto", "cpu", "gpu"]
EngineName = Literal["auto", "openvino", "triton"]


class ServingSettings(Record):
    """How the versions of an endpoint run. What is not given is found by measurement when a model is loaded."""

    max_batch_rows: RowCount | None = None
    """Rows of the largest batch; 1 runs each request alone."""
    batch_delay_ms: DelayMs | None = None
    """How long a batch that is not full waits for more requests; by default not at all."""
    max_queue_ms: QueueMs | None = None
    """How long a request may wait before it is refused."""
    instances: RunCount | None = None
    """Runs at a time; by default one for each core."""
    threads: RunCount | None = None
    """Threads of one run; by default 1."""
    timeout_ms: TimeoutMs | None = None
    """How long a run may take; by default a minute."""
    engine: EngineName | None = None
    """What runs versions; by default, or with auto, what their format says. OpenVINO runs ONNX files; Triton is the
    server of `serving.triton`, which has the version in its repository."""
    device: Device | None = None
    """Where versions run; by default, or with auto, on a GPU if the engine finds one."""
    compiled: bool | None = None
    """Whether torch compiles the program of a version when it loads it; by default not."""
    requests_per_second: RequestRate | None = None
    """Requests of each caller; by default `serving.limits`."""
    burst: BurstSize | None = None
    """Requests that a caller who has been idle may send at once; by default those of a second."""

    @model_validator(mode="after")
    def _burst_has_a_rate(self) -> Self:
        if self.burst is not None and self.requests_per_second is None:
            raise ValueError("burst needs requests_per_second")
        return self

    @property
    def of_runs(self) -> ServingSettings:
        """Return what matters to a loaded model: all but the limits of callers."""
        return self.model_copy(update={"requests_per_second": None, "burst": None})


class MeasuredVersion(Record):
    """How the model server runs a version, and what it measured when it loaded it."""

    version: Name
    run_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """A run with one row."""
    row_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """What each further row of a batch adds."""
    batch_rows: Annotated[int, Field(ge=1)]
    """Rows of the largest batch; 1: requests do not share runs."""
    instances: Annotated[int, Field(ge=1)]
    threads: Annotated[int, Field(ge=1)]
    max_queue_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """How long a request may wait while the model is not overloaded."""
    place: Literal["event loop", "threads", "process"]
    """Where it runs: a quick one on the event loop, a slow one in threads, an unbounded one in its own process."""
