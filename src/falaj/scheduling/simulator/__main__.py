"""A replay in a process of its own: it computes for long, and whoever waits for it must not stand still meanwhile.

In, a line each of JSON: the question, the attempts of the past, then an empty line. Out, as lines of JSON: how many
jobs of how many are replayed, and in the end the comparison, or why there is none. It ends when nobody holds the other
end of its input any more, and knows nothing but what it was told.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, BinaryIO

from falaj.errors import FalajError
from falaj.records.scheduling.accounting import PastAttempt
from falaj.records.scheduling.simulation import WhatIfQuestion
from falaj.scheduling.simulator.history import answer

TELL_EVERY_S = 0.25
NICER = 5
"""The processes of the platform go first."""


def main() -> None:
    os.nice(NICER)
    said, out = sys.stdin.buffer, sys.stdout.buffer
    try:
        question = WhatIfQuestion.model_validate_json(said.readline())
        found = answer(question, _attempts(said), progress=ProgressLines(out))
        _tell(out, {"comparison": found.model_dump(mode="json")})
    except FalajError as error:
        _tell(out, {"refused": [error.code, error.message]})
    except Exception:
        _tell(out, {"failed": traceback.format_exc()})


def _attempts(said: BinaryIO) -> Iterator[PastAttempt]:
    while line := said.readline():
        if line == b"\n":
            threading.Thread(target=_end_with_parent, name="lifeline", daemon=True).start()
            return
        yield PastAttempt.model_validate_json(line)
    os._exit(1)  # whoever asked is gone


def _end_with_parent() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)


class ProgressLines:
    """Says now and then how far it is."""

    def __init__(self, out: BinaryIO) -> None:
        self._out, self._next = out, 0.0

    def __call__(self, done: int, of: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + TELL_EVERY_S
            _tell(self._out, {"done": done, "of": of})


def _tell(out: BinaryIO, words: dict[str, Any]) -> None:
    out.write(json.dumps(words).encode() + b"\n")
    out.flush()


if __name__ == "__main__":
    main()
