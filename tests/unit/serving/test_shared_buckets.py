"""Rate limits that replicas share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from falaj.apps.model_server.platform import shared_buckets
from falaj.apps.model_server.platform.shared_buckets import SharedBuckets
from falaj.errors import RateLimited
from falaj.records.serving.endpoints import Endpoint, Route
from falaj.serving.runtime.rate_limits import LocalBuckets, RateLimit, RateLimits

ENDPOINT = Endpoint(name="shop", model="m", routes=(Route(version="1", weight=1),))
OTHER_PROCESS = """
import sys
from pathlib import Path
from falaj.apps.model_server.platform.shared_buckets import SharedBuckets
print(SharedBuckets(Path(sys.argv[1])).full_at(("shop", "amal")))
"""


def sent(limits: RateLimits, caller: str, now: float, *, most: int = 100) -> int:
    """Return how many requests a caller may send at once."""
    for number in range(most):
        try:
            limits.require(ENDPOINT, caller, now)
        except RateLimited:
            return number
    return most


def sharing(path: Path, limit: RateLimit) -> RateLimits:
    made = RateLimits(limit)
    made.buckets = SharedBuckets(path)
    return made


def test_replicas_count_together(tmp_path: Path) -> None:
    limit = RateLimit(per_second=10, burst=5)
    one, other = sharing(tmp_path / "rates", limit), sharing(tmp_path / "rates", limit)

    assert sent(one, "amal", 1000.0, most=3) == 3
    assert sent(other, "amal", 1000.0) == 2
    assert sent(one, "amal", 1000.0) == 0
    assert sent(one, "badr", 1000.0) == 5
    assert sent(other, "amal", 1000.2) == 2
    assert sent(one, "amal", 2000.0) == 5


def test_another_process_finds_the_same_bucket(tmp_path: Path) -> None:
    SharedBuckets(tmp_path / "rates").fill(("shop", "amal"), 12.5, 1.0)

    found = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, str(tmp_path / "rates")],
        capture_output=True,
        text=True,
        check=True,
    )

    assert found.stdout.strip() == "12.5"


def test_callers_of_one_slot_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_buckets, "SLOTS", 8)
    buckets = SharedBuckets(tmp_path / "rates")
    names = [("shop", f"caller {number}") for number in range(8)]
    for number, name in enumerate(names):
        buckets.fill(name, 100.0 + number, now=1.0)

    buckets.fill(("shop", "one too many"), 100.0, now=1.0)

    assert [buckets.full_at(name) for name in names] == [100.0 + number for number in range(8)]
    assert buckets.full_at(("shop", "one too many")) == 0.0
    buckets.fill(("shop", "later"), 300.0, now=200.0)  # all others are full again
    assert buckets.full_at(("shop", "later")) == 300.0


def test_buckets_of_one_process_forget_those_that_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("falaj.serving.runtime.rate_limits.MAX_BUCKETS", 3)
    buckets = LocalBuckets()

    for number in range(4):
        buckets.fill(("shop", str(number)), float(number), now=1.5)

    assert len(buckets) == 2
