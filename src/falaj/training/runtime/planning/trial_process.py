"""Trials in a forked child process, so that a candidate that crashes or hangs does not affect the run.

A fork can run any model and loss, also those that no other process could import. A fork cannot use CUDA once
its parent has initialized it: then `can_fork_for_gpu` is false, and the caller tries only safe candidates. On a
CPU a child only runs one step of each plan as a rehearsal; speed is measured in the process of the run.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import IO

import torch

from falaj.training.runtime.planning.plan import Plan, plan_from
from falaj.training.runtime.planning.trials import TrialOutcome, TrialRunner, is_fatal, outcome_from

START_S = 30.0
POLL_S = 0.5
PR_SET_PDEATHSIG = 1


def can_fork() -> bool:
    return sys.platform == "linux"  # system libraries of other platforms do not survive a fork


def can_fork_for_gpu() -> bool:
    return hasattr(os, "fork") and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


class TrialProcessLost(Exception):
    """The child process crashed, hung, or cannot use the GPU; the message states the reason."""


class TrialProcess:
    """A forked process that tries plans one after the other."""

    def __init__(self, trials: TrialRunner, *, alive: Callable[[], bool]) -> None:
        self._alive = alive
        to_child, self._to = os.pipe()
        self._from, from_child = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._to)
            os.close(self._from)
            _run_child(trials, to_child, from_child)
        os.close(to_child)
        os.close(from_child)
        self._received = b""

    def wait_ready(self) -> None:
        """Wait until the child can use its device."""
        answer = self._read_line(START_S)
        if answer != "ready":
            raise TrialProcessLost(answer)

    def try_out(self, plan: Plan, *, within_s: float) -> TrialOutcome:
        """Return the outcome of `plan` in the child. Raise TrialProcessLost if the child does not answer."""
        try:
            os.write(self._to, json.dumps(plan.facts()).encode() + b"\n")
        except BrokenPipeError:
            raise TrialProcessLost(self._exit_reason()) from None
        outcome = outcome_from(json.loads(self._read_line(within_s)))
        if is_fatal(outcome):
            raise TrialProcessLost(outcome.rejection or "")
        return outcome

    def end(self) -> None:
        """Kill the child and all processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        for pipe in (self._to, self._from):
            with contextlib.suppress(OSError):
                os.close(pipe)

    def _read_line(self, within_s: float) -> str:
        deadline = time.monotonic() + within_s
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TrialProcessLost(f"did not end within {within_s:.0f} s")
            if select.select([self._from], [], [], min(left, POLL_S))[0]:
                if not (more := os.read(self._from, 1 << 16)):
                    raise TrialProcessLost(self._exit_reason())
                self._received += more
            elif not self._alive():
                raise TrialProcessLost("the run was cancelled")
        line, _, self._received = self._received.partition(b"\n")
        return line.decode()

    def _exit_reason(self) -> str:
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        return f"crashed ({signal.Signals(-code).name})" if code < 0 else f"crashed (exit status {code})"


def _run_child(trials: TrialRunner, orders: int, answers: int) -> None:
    """Run the child process until it exits. It does not write to anything of the parent."""
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        faulthandler.disable()  # crashes of candidates are expected
        redirect_output_to_null()
        gc.freeze()  # objects of the parent are never collected
        gc.set_threshold(
            50_000, 20, 100
        )  # compiling makes many objects, and each trial ends with a collection
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the threads of the parent's pool do not exist after a fork
        if trials.on_gpu:
            _serve(trials, orders, answers)
        else:
            _serve_with_threads(threads, trials, orders, answers)
    finally:
        os._exit(0)


def _serve_with_threads(threads: int, trials: TrialRunner, orders: int, answers: int) -> None:
    """Serve from a new thread, which has its own thread pool: torch then computes as it will in the run."""

    def serve() -> None:
        torch.set_num_threads(threads)
        _serve(trials, orders, answers)

    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # the compile workers belong to the parent
    if (inductor := sys.modules.get("torch._inductor.config")) is not None:
        inductor.compile_threads = 1  # type: ignore[attr-defined]
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()


def _serve(trials: TrialRunner, orders: int, answers: int) -> None:
    with os.fdopen(answers, "w") as out, os.fdopen(orders) as lines:
        _write_line(out, _readiness(trials))
        for line in lines:
            outcome = trials.try_out(plan_from(json.loads(line)))
            _write_line(out, json.dumps(outcome.facts()))
            if is_fatal(outcome):
                break


def redirect_output_to_null() -> None:
    """Discard the output of compilers and libraries during trials."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _readiness(trials: TrialRunner) -> str:
    """Return "ready", or why this child cannot train: it lacks the threads that its parent has for gradients."""
    try:
        value = torch.ones(2, device="cuda" if trials.on_gpu else "cpu", requires_grad=True)
        (value * value).sum().backward()  # type: ignore[no-untyped-call]
        if trials.on_gpu:
            torch.cuda.synchronize()
    except RuntimeError as failure:
        return str(failure).strip().split("\n")[0]
    return "ready"


def _write_line(out: IO[str], line: str) -> None:
    out.write(line + "\n")
    out.flush()
