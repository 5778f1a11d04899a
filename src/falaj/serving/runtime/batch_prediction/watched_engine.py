"""A time limit for runs of a model in the process of a batch, which nothing but the end of the process stops."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt

from falaj.errors import Unavailable
from falaj.records.serving.tensors import ServedModel
from falaj.serving.runtime.engine import LONGEST_S, ModelEngine
from falaj.serving.runtime.probe import RunCost

Array = npt.NDArray[Any]

LOAD_S = 120.0
"""How long a model may take to be opened and probed."""
GRACE_S = 5.0
"""Engines that stop a run themselves do so at its limit; this much later it hangs."""
LOOK_EVERY_S = 0.5


class HangWatch:
    """Watches what a process must finish in time; `on_hang` is called once, in the thread that watches."""

    def __init__(self, on_hang: Callable[[Unavailable], None]) -> None:
        self._on_hang = on_hang
        self._running: dict[int, tuple[float, str]] = {}
        threading.Thread(target=self._watch, name="hang watch", daemon=True).start()

    def begin(self, what: str, *, limit_s: float) -> int:
        """Expect an `end` within `limit_s`; return what to pass to it."""
        mark = threading.get_ident()
        self._running[mark] = time.monotonic() + limit_s, what
        return mark

    def end(self, mark: int) -> None:
        del self._running[mark]

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_EVERY_S)
            now = time.monotonic()
            for until, what in list(self._running.values()):
                if now > until:
                    self._on_hang(Unavailable(what))
                    return


class WatchedEngine:
    """An engine whose runs are watched."""

    def __init__(self, engine: ModelEngine, watch: HangWatch) -> None:
        self._engine, self._watch = engine, watch
        self._name = f"{engine.model.name}@{engine.model.version}"

    @property
    def model(self) -> ServedModel:
        return self._engine.model

    @property
    def cost(self) -> RunCost:
        return self._engine.cost

    @property
    def in_process(self) -> bool:
        return self._engine.in_process

    def run(self, inputs: Sequence[Array], *, limit_s: float = LONGEST_S) -> list[Array]:
        what = (
            f"a run of {self._name} hangs: it took longer than its time limit of {LONGEST_S:g} s; mend the model, then "
            "run the same command again: it goes on where it stopped"
        )
        mark = self._watch.begin(what, limit_s=LONGEST_S + GRACE_S)
        try:
            return self._engine.run(inputs, limit_s=limit_s)
        finally:
            self._watch.end(mark)

    def close(self) -> None:
        self._engine.close()
