"""A process that imports runs again and again, each time in a fork that is killed soon after one of its writes."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import falaj.sdk.embedded as embedded
import falaj.sdk.run_import.sources  # noqa: F401 - loaded once, before the forks
from falaj.governance.operations.gate import Gate


def main(home: str, source: str, *writes: str) -> None:
    """Import `source` once for each number of `writes`, and print how each fork ended: -9 is SIGKILL."""
    for each in writes:
        fork = os.fork()
        if fork == 0:
            import_runs(home, source, int(each))
            os._exit(0)
        _, status = os.waitpid(fork, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def import_runs(home: str, source: str, writes: int) -> None:
    """Import `source` and print the report; after so many writes wait up to 10 ms, and kill this process."""
    left, delay_s = writes, random.Random(writes).uniform(0, 0.01)
    perform = Gate.perform

    def counted(self: Gate, operation: Any, service: Any, given: Any) -> Any:
        nonlocal left
        left -= not operation.mode.reads
        if left == 0:
            threading.Thread(target=die, args=(delay_s,)).start()
        return perform(self, operation, service, given)

    Gate.perform = counted  # type: ignore[method-assign]
    with embedded.open_platform(Path(home)) as platform:
        print(platform.import_runs(source).model_dump_json(), flush=True)


def die(after_s: float) -> None:
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
