"""A plan: everything about how a step is computed that changes its speed, and nothing of what is computed."""

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
    """How each step is computed. A plan without changes is the plain loop: eager, fp32, one micro-batch."""

    precision: Precision = "fp32"
    layout: MemoryFormat = "contiguous"
    """channels_last: what convolutions on GPUs, and some CPUs, like best."""
    compile: CompileMode = "off"
    """The mode of `torch.compile`, which is given the model and the loss together."""
    graph: bool = False
    """The whole step, from the samples' numbers to the update, replayed as one CUDA graph."""
    fused: bool = False
    """One kernel for the optimizer's whole update; only for optimizers that are given by name."""
    micro_batches: int = 1
    """How many pieces a global batch is computed in."""
    batch_size: int | None = None
    """The global batch, where the search was asked to choose it."""
    threads: int | None = None
    """How many threads an operation uses on a CPU; none: as many as torch is set to."""
    workers: int | None = None
    """How many processes read the samples of a dataset; none: as many as seem to pay when the run starts."""
    prefetch: int | None = None
    """How many steps each of them reads ahead; none: two."""
    pinned: bool | None = None
    """On a GPU, whether the next batch is sent beside the computing, out of page-locked memory; none: it is."""

    def __post_init__(self) -> None:
        allowed: dict[str, tuple[str, ...]] = {
            "precision": PRECISIONS,
            "layout": MEMORY_FORMATS,
            "compile": COMPILE_MODES,
        }
        faults = [
            TrainingFault(f"tune.{name}", getattr(self, name), ", ".join(words))
            for name, words in allowed.items()
            if getattr(self, name) not in words
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
        """The plan in a line: bf16, fused, compile, batch 64."""
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
        """As plain values, for checkpoints and the cache."""
        return asdict(self)


def plan_from(values: Mapping[str, Any]) -> Plan:
    """The plan that `facts` told of; refuses what is none."""
    known = {field.name for field in fields(Plan)}
    return Plan(**{name: value for name, value in values.items() if name in known})
