"""Threads of the controller that keep objects of a cluster as the platform wants them: a slow cluster delays no job."""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from falaj.control.authorization import acting, controller_caller
from falaj.errors import FalajError, Fenced
from falaj.governance.operations.caller import start_thread
from falaj.governance.operations.gate import Gate

log = logging.getLogger("falaj.controller")

CLOSE_S = 5.0


class ClusterReconciler(Protocol):
    """Makes objects of a cluster as they are wanted."""

    @property
    def is_due(self) -> bool: ...

    def step(self) -> object: ...


class ClusterSync:
    """Runs a reconciler, one step at a time. `what` it keeps is named in the log."""

    def __init__(self, gate: Gate, reconciler: ClusterReconciler | None, *, fence: int, what: str) -> None:
        self._gate, self._reconciler, self._fence, self._what = gate, reconciler, fence, what
        self._thread: threading.Thread | None = None
        self._refusal: str | None = None

    def tick(self) -> None:
        """Begin a step if one is due."""
        if self._reconciler is None or not self._reconciler.is_due:
            return
        if self._thread is None or not self._thread.is_alive():
            self._thread = start_thread(self._step, self._reconciler, name=self._what)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _step(self, reconciler: ClusterReconciler) -> None:
        try:
            with acting(controller_caller(self._gate.database), fence=self._fence):
                reconciler.step()
            self._refusal = None
        except Fenced:
            return  # the next controller does it
        except FalajError as error:
            if error.message != self._refusal:  # each reason is logged once
                self._refusal = error.message
                log.warning("%s are not kept", self._what, extra={"reason": error.message})
        except Exception:
            log.exception("failed to keep %s", self._what)
