"""How worker processes are started: forked where that is safe, else as new interpreters, else not at all."""

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
    """How workers are started; without a method they are not, and `why` says so."""

    method: Method | None
    why: str = ""
    needs_main: bool = False


def choose_start_method(items: DatasetSource) -> StartMethod:
    """A fork copies any dataset, but not after CUDA was started or beside threads that may hold a lock."""
    reason = reason_not_to_fork()
    if reason is None:
        return StartMethod("fork")
    try:
        needs_main = b"__main__" in bytes(ForkingPickler.dumps(items.dataset))
    except Exception as error:
        return StartMethod(None, f"{reason}, and the dataset cannot be sent to a new process ({error})")
    if needs_main and not is_main_importable():
        fix = 'start training under `if __name__ == "__main__":`, or define the dataset in another module'
        return StartMethod(None, f"{reason}, and a new process would run this script again; {fix}")
    return StartMethod("spawn", reason, needs_main)


def reason_not_to_fork() -> str | None:
    """Why this process should not be forked."""
    if not hasattr(os, "fork"):
        return "this system has no fork"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "CUDA is in use"
    if threading.active_count() > 1:
        return "other threads are running"
    return None


def is_main_importable() -> bool:
    """Whether the script looks as if it minded being imported: else it would train in each of its workers."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    try:
        return path is not None and "__main__" in Path(path).read_text()
    except (OSError, ValueError):
        return False


def start_process(process: BaseProcess, way: StartMethod) -> None:
    """Start `process`. A script whose classes are not needed there is not imported there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: torch's, which rest
        if way.method == "spawn" and not way.needs_main:
            with _without_main():
                process.start()
        else:
            process.start()


def require_not_in_worker() -> None:
    """A worker that imports the script it belongs to must not train as well."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        fix = 'start training under `if __name__ == "__main__":`'
        faults = [TrainingFault("__main__", "imported by a process that it started", fix=fix)]
        raise InvalidTraining("this script trains whenever it is imported", faults=faults)


def cores_per_rank() -> int:
    """How many cores this process can count on, beside the others of its world on this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    beside = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    return max(1, cores // beside)


@contextmanager
def _without_main() -> Iterator[None]:
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
