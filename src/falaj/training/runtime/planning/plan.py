"""A plan: the options of a training step that change its speed, but not its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from falaj.training.runtime.errors import InvalidTraining, TrainingFault

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
PRECISIONS: tuple[str, ...] = get_args(Precision)

MemoryFormat = Literal["contiguous", "channels_last"]
MEMORY_FORMATS: tuple[str, ...] = get_args(MemoryFormat)

CompileMode = Literal["off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
COMPILE_MODES: tuple[str, ...] = get_args(CompileMode)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How each step is computed. The default plan is the plain loop: eager, fp32, one micro-batch."""

    precision: Precision = "fp32"
    layout: MemoryFormat = "contiguous"
    """channels_last is the fastest for convolutions on GPUs and some CPUs."""
    compile: CompileMode = "off"
    """The mode of `torch.compile`, applied to model and loss together."""
    graph: bool = False
    """Replay the whole step, from the sample indices to the update, as one CUDA graph."""
    fused: bool = False
    """Use one kernel for the whole optimizer update; only for optimizers that are given by name."""
    micro_batches: int = 1
    """The number of micro-batches of a global batch."""
    batch_size: int | None = None
    """The global batch size, if the search chooses it."""
    threads: int | None = None
    """The number of CPU threads of an operation; None: torch's setting."""
    workers: int | None = None
    """The number of processes that read a dataset; None: chosen when the run starts."""
    prefetch: int | None = None
    """The number of steps that each worker reads ahead; None: two."""
    pinned: bool | None = None
    """On a GPU, whether the next batch is copied asynchronously from page-locked memory; None: yes."""

    def __post_init__(self) -> None:
        allowed: dict[str, tuple[str, ...]] = {
            "precision": PRECISIONS,
            "layout": MEMORY_FORMATS,
            "compile": COMPILE_MODES,
        }
        faults = [
            TrainingFault(f"tune.{name}", getattr(self, name), ", ".join(values))
            for name, values in allowed.items()
            if getattr(self, name) not in values
        ]
        counts = {"micro_batches": self.micro_batches, "batch_size": self.batch_size, "threads": self.threads}
        counts["prefetch"] = self.prefetch
        for name, count in counts.items():
            if count is not None and (not isinstance(count, int) or count < 1):
                faults.append(TrainingFault(f"tune.{name}", count, "a whole number, at least 1"))
        if self.workers is not None and (not isinstance(self.workers, int) or self.workers < 0):
            faults.append(TrainingFault("tune.workers", self.workers, "a whole number, at least 0"))
        if faults:
            raise InvalidTraining("invalid plan", faults=faults)

    @property
    def summary(self) -> str:
        """The plan in one line: bf16, fused, compile, batch 64."""
        parts: list[str] = [self.precision]
        parts += ["channels_last"] * (self.layout == "channels_last")
        parts += ["fused"] * self.fused
        parts += [] if self.compile == "off" else [f"compile={self.compile}"]
        parts += ["graph"] * self.graph
        parts += [f"{self.threads} threads"] * (self.threads is not None)
        parts += [f"batch {self.batch_size}"] * (self.batch_size is not None)
        parts += [f"{self.micro_batches} micro-batches"] * (self.micro_batches > 1)
        parts += [f"{self.workers} workers"] * bool(self.workers)
        parts += [f"prefetch {self.prefetch}"] * (self.prefetch is not None)
        parts += ["not pinned"] * (self.pinned is False)
        return ", ".join(parts)

    def facts(self) -> dict[str, Any]:
        """Return the plan as plain values, for checkpoints and the cache."""
        return asdict(self)


def plan_from(values: Mapping[str, Any]) -> Plan:
    """Return the plan that `facts` described. Raise InvalidTraining for invalid values."""
    known = {field.name for field in fields(Plan)}
    return Plan(**{name: value for name, value in values.items() if name in known})
