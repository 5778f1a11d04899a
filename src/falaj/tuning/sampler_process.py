"""Start the process in which Optuna samples, send it commands, and stop it."""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, BinaryIO, cast

from falaj.errors import Internal, Unavailable
from falaj.extras import how_to_install
from falaj.records.tuning import ParamImportance, ParamValues, StudySettings, StudyTrial

log = logging.getLogger("falaj.tuning")

PROGRAM = "falaj.tuning.runtime"
HANDED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH")
"""Environment variables passed on; the others may hold secrets."""
ANSWER_S = 120.0


class SamplerProcess:
    """Optuna in its own process, with the trials of one study."""

    def __init__(self, settings: StudySettings, *, seed: int) -> None:
        grid = None
        if settings.sampler == "grid":
            grid = {name: each.grid() for name, each in settings.space.items()}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={name: os.environ[name] for name in HANDED_ON if name in os.environ},
            start_new_session=True,  # not to receive Ctrl-C of the terminal
        )
        self._in, self._out = cast(BinaryIO, self._process.stdin), cast(BinaryIO, self._process.stdout)
        self._err = cast(BinaryIO, self._process.stderr)
        self.used_at = time.monotonic()
        self._send({"settings": settings.model_dump(mode="json"), "seed": seed, "grid": grid})

    @property
    def pid(self) -> int:
        return self._process.pid

    def replay(self, trials: Iterable[StudyTrial], told: Sequence[int]) -> None:
        """Take the trials of the study in the order in which they were asked for and, as in `told`, ended.

        A number in `told` is that of a trial that was asked for, -1 - number that of one that ended.
        """
        by_number = {each.number: each for each in trials}
        for event in told:
            trial = by_number[event if event >= 0 else -1 - event]
            if event >= 0:
                self._call("replay", number=trial.number, params=trial.params)
                continue
            if trial.reports:
                self.report(trial.number, [each.value for each in trial.reports], after=0)
            self.tell(trial)

    def ask(self) -> tuple[int, ParamValues]:
        """Return the number and the parameters of the next trial."""
        found = self._call("ask")
        return found["number"], found["params"]

    def report(self, number: int, values: Sequence[float], *, after: int) -> bool:
        """Report values of a trial, behind the first `after` ones; return whether it is to be stopped."""
        return bool(self._call("report", number=number, values=[*values], after=after)["prune"])

    def tell(self, trial: StudyTrial) -> None:
        """Tell how a trial ended."""
        self._call("tell", number=trial.number, state=trial.state, values=[*trial.values])

    def importance(self) -> tuple[ParamImportance, ...]:
        """Return the importance of the parameters for each metric, the greatest first; none if trials are too few."""
        found: Mapping[str, Mapping[str, float]] = self._call("importance")["importance"]
        return tuple(
            ParamImportance(param=name, importance=share, metric=metric)
            for metric, shares in found.items()
            for name, share in sorted(shares.items(), key=lambda each: -each[1])
        )

    def close(self) -> None:
        """Kill the process if it still runs, and wait for its end."""
        self._process.kill()
        self._process.wait()
        self._out.close()
        self._err.close()
        with suppress(BrokenPipeError):  # of unsent input
            self._in.close()

    def _call(self, verb: str, **values: Any) -> Any:
        self.used_at = time.monotonic()
        self._send({"do": verb, **values})
        ready, _, _ = select.select([self._out], [], [], ANSWER_S)
        line = self._out.readline() if ready else b""
        if not line.endswith(b"\n"):
            raise self._lost(answered=bool(ready))
        answer = json.loads(line)
        if "failed" in answer:
            log.error("sampler failed", extra={"reason": answer["failed"]})
            last = str(answer["failed"]).strip().rpartition("\n")[2]
            raise Internal(f"Optuna could not {verb}: {last[:500]}")
        return answer

    def _send(self, message: Mapping[str, Any]) -> None:
        with suppress(BrokenPipeError):  # it has exited; the missing answer tells
            self._in.write(json.dumps(message).encode() + b"\n")
            self._in.flush()

    def _lost(self, *, answered: bool) -> Exception:
        self._process.kill()
        status, said = self._process.wait(), self._err.read(4000).decode(errors="replace")
        if "No module named 'optuna'" in said or "No module named 'cmaes'" in said:
            return Internal(
                f"Optuna is not installed: {how_to_install('optuna')} on the machine of the controller"
            )
        why = f"exited with status {status}" if answered else f"did not answer within {ANSWER_S:g} s"
        log.error("sampler process lost", extra={"reason": why, "said": said})
        return Unavailable(f"the process that samples {why}")
