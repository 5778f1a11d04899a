"""A process that imports runs, and is killed soon after one of its writes has begun."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import falaj as fj
from falaj.governance.operations.gate import Gate


def main(home: str, source: str, writes: str, seed: str) -> None:
    """Import `source`; after so many writes wait up to 10 ms, and kill this process with SIGKILL."""
    left, delay_s = int(writes), random.Random(int(seed)).uniform(0, 0.01)
    perform = Gate.perform

    def counted(self: Gate, operation: Any, service: Any, given: Any) -> Any:
        nonlocal left
        left -= not operation.mode.reads
        if left == 0:
            threading.Thread(target=die, args=(delay_s,)).start()
        return perform(self, operation, service, given)

    Gate.perform = counted  # type: ignore[method-assign]
    with fj.open(Path(home)) as platform:
        print(platform.import_runs(source).model_dump_json(), flush=True)


def die(after_s: float) -> None:
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
