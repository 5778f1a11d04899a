"""The start method of worker processes: fork where it is safe, else spawn, else none."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

import torch

from falaj.training.runtime.data.sources import DatasetSource
from falaj.training.runtime.errors import InvalidTraining, TrainingFault

Method = Literal["fork", "spawn"]


class StartMethod(NamedTuple):
    """The start method of workers; None with the reason `why` if they cannot be started."""

    method: Method | None
    why: str = ""
    needs_main: bool = False


def choose_start_method(items: DatasetSource) -> StartMethod:
    """Choose fork, which copies any dataset, unless CUDA is initialized or other threads may hold a lock."""
    reason = reason_not_to_fork()
    if reason is None:
        return StartMethod("fork")
    try:
        needs_main = b"__main__" in bytes(
            ForkingPickler.dumps((items.dataset, items.own_collate, items.worker_init))
        )
    except Exception as error:
        return StartMethod(None, f"{reason}, and the dataset cannot be sent to a new process ({error})")
    if needs_main and not is_main_importable():
        fix = 'start training under `if __name__ == "__main__":`, or define the dataset in another module'
        return StartMethod(None, f"{reason}, and a new process would run this script again; {fix}")
    return StartMethod("spawn", reason, needs_main)


def reason_not_to_fork() -> str | None:
    """Return why this process should not be forked; None if it can be."""
    if not hasattr(os, "fork"):
        return "this system has no fork"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "CUDA is in use"
    if threading.active_count() > 1:
        return "other threads are running"
    return None


def is_main_importable() -> bool:
    """Return whether the script seems to guard its main code: else it would train in each worker."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    try:
        return path is not None and "__main__" in Path(path).read_text()
    except (OSError, ValueError):
        return False


def start_process(process: BaseProcess, way: StartMethod) -> None:
    """Start `process`. The script is imported there only if its classes are needed."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # about forks beside threads: those of torch are idle
        if way.method == "spawn" and not way.needs_main:
            with _without_main():
                process.start()
        else:
            process.start()


def require_not_in_worker() -> None:
    """Raise InvalidTraining in a worker that imports its own script and starts to train."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        fix = 'start training under `if __name__ == "__main__":`'
        faults = [TrainingFault("__main__", "imported by a process that it started", fix=fix)]
        raise InvalidTraining("this script trains whenever it is imported", faults=faults)


def cores_per_rank() -> int:
    """Return the number of cores per process of this machine."""
    beside = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    return max(1, usable_cores() // beside)


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def _without_main() -> Iterator[None]:
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
