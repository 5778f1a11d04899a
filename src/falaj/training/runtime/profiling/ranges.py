"""Named ranges around the parts of a step: for a profiler of torch's, or for Nsight Systems by NVTX."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch

from falaj.training.runtime.profiling.events import PREFIX
from falaj.training.runtime.step.engine import StepEngine

MakeRange: TypeAlias = Callable[[str], AbstractContextManager[Any]]
Undo: TypeAlias = Callable[[], None]


def torch_range(name: str) -> AbstractContextManager[Any]:
    """A range that torch's profiler sees."""
    return torch.profiler.record_function(PREFIX + name)


def nvtx_range(name: str) -> AbstractContextManager[Any]:
    """A range that Nsight Systems sees."""
    return torch.cuda.nvtx.range(PREFIX + name)


def add_ranges(engine: StepEngine, mark: MakeRange) -> Undo:
    """Have ranges around waiting for data, forward, backward and optimizer until what is returned is called."""

    def around(name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*values: Any, **options: Any) -> Any:
            with mark(name):
                return part(*values, **options)

        return marked

    loader, leave_step = engine.loader, engine.step.observe(around)
    loader.take = around("data", loader.take)  # type: ignore[method-assign]

    def leave() -> None:
        leave_step()
        del loader.take

    return leave
