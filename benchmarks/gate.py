"""Cost of the gate: the same handlers with and without it, on SQLite, in one process."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from falaj.assembly.home import open_home
from falaj.assembly.platform import LocalPlatform, assemble, local_caller
from falaj.governance import objects
from falaj.governance.operations.call import Call, enter, leave
from falaj.governance.operations.caller import Terms
from falaj.records.names import ROOT
from harness import Result, Rule, report

QUICK = True
ROUNDS = 5
CALLS = 300
CALLERS = 16
SECONDS = 3.0


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        platform = assemble(open_home(Path(folder) / "home", Path(folder) / "config"), as_owner=True)
        names = (f"user-{number}" for number in itertools.count())
        blob = _a_blob(platform)
        bare = Bare(platform)

        reads = _added_us(lambda: platform.services.blobs.show(blob), lambda: bare.show(blob))
        writes = _added_us(
            lambda: platform.services.users.create(next(names)), lambda: bare.create(next(names))
        )
        read_rate, bare_read_rate = (
            _rate(lambda: platform.services.blobs.show(blob)),
            _rate(lambda: bare.show(blob)),
        )
        write_rate = _rate(lambda: platform.services.users.create(next(names)))
        bare_write_rate = _rate(lambda: bare.create(next(names)))
        hot = _hot_us(platform, blob)
        platform.close()
    report(
        "gate",
        [
            Result("a gated read adds, µs at the median", reads[0], reads[1], 500, Rule.FALAJ_AT_MOST),
            Result("an audited write adds, µs at the median", writes[0], writes[1], 1500, Rule.FALAJ_AT_MOST),
            Result(f"gated reads/s, {CALLERS} callers", read_rate, bare_read_rate, 2000, Rule.FALAJ_AT_LEAST),
            Result(
                f"audited writes/s, {CALLERS} callers", write_rate, bare_write_rate, 400, Rule.FALAJ_AT_LEAST
            ),
            Result("a cached decision on the hot path, µs", hot, hot, 5, Rule.FALAJ_AT_MOST),
        ],
    )


class Bare:
    """The same handlers in their transaction, without the gate: no policy, residency, audit, lineage or event."""

    def __init__(self, platform: LocalPlatform) -> None:
        self._platform = platform
        self._caller = local_caller(platform.database)

    def show(self, blob: str) -> Any:
        services = self._platform.services
        with self._platform.database.read() as tx:
            return self._body(services.blobs, "show", tx, objects.by_id(tx, blob), blob=blob)

    def create(self, name: str) -> Any:
        services = self._platform.services
        with self._platform.database.write() as tx:
            return self._body(services.users, "create", tx, objects.by_id(tx, ROOT), name=name, kind="user")

    def _body(self, service: Any, verb: str, tx: Any, target: Any, **given: Any) -> Any:
        operation = getattr(type(service), verb).operation
        call = Call(
            operation, self._caller, operation.check(given), Terms(), self._platform.gate.clock(), target
        )
        call._tx = tx
        token = enter(call)
        try:
            return operation.body(service, **given)
        finally:
            leave(token)


def _a_blob(platform: LocalPlatform) -> str:
    staged = platform.services.blobs.upload(iter([b"a few bytes"]))
    return platform.services.blobs.commit(staged.id, name="a-blob").id


def _added_us(gated: Callable[[], Any], bare: Callable[[], Any]) -> tuple[float, float]:
    """Return what the gate adds at the median, and the time of the bare handler, in µs, in alternation."""
    times: dict[Callable[[], Any], list[float]] = {gated: [], bare: []}
    for _ in range(ROUNDS):
        for work in (gated, bare):
            for _ in range(CALLS):
                began = time.perf_counter()
                work()
                times[work].append(time.perf_counter() - began)
    middle = {work: statistics.median(taken) * 1e6 for work, taken in times.items()}
    return middle[gated] - middle[bare], middle[bare]


def _rate(work: Callable[[], Any]) -> float:
    """Return calls per second with many concurrent callers."""
    done = [0] * CALLERS
    until = time.perf_counter() + SECONDS

    def call(number: int) -> None:
        while time.perf_counter() < until:
            work()
            done[number] += 1

    threads = [threading.Thread(target=call, args=(number,)) for number in range(CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / SECONDS


def _hot_us(platform: LocalPlatform, blob: str) -> float:
    caller, hot = local_caller(platform.database), platform.gate.hot
    times = []
    for _ in range(20_000):
        began = time.perf_counter()
        hot.admit(caller, "blobs.show", blob, b"a request of some bytes")
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


if __name__ == "__main__":
    main()
