"""KLL sketches against Apache's library: the errors of ranks and shares, and the CPU time of updates and merges.

Both sides get the same streams, in processes of their own that take turns. The errors are the 99th percentile of the
largest error of a stream, the times the shortest of the rounds. Merged sketches were updated in batches of 500. The
library does not check the bytes of stored sketches, we do.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness import Result, environment, peer_venv, report, say

QUICK = True
PEER = ["datasketches==5.2.0", f"numpy=={np.__version__}"]
ROUNDS = 3
TRIALS = 200
BATCHES = (1, 32, 1_000, 100_000)
PARTS = {
    "1,000 of 50": [50] * 1_000,
    "100 of 1,000": [1_000] * 100,
    "20 of 20,000": [20_000] * 20,
    "17 of 1 to 65,536": [2**power for power in range(17)],
}
STREAMS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "random": lambda rng, size: rng.normal(size=size),
    "sorted": lambda rng, size: np.arange(float(size)),
    "reversed": lambda rng, size: np.arange(float(size))[::-1].copy(),
    "ten distinct": lambda rng, size: rng.integers(0, 10, size).astype(np.float64),
    "zipf": lambda rng, size: rng.zipf(1.3, size).astype(np.float64),
}

Figures = dict[str, float]
Ranks = Callable[[Any, Any], Any]


def main() -> None:
    sides = {"falaj": Path(sys.executable), "peer": peer_venv("datasketches", PEER)}
    figures: dict[str, Figures] = {side: measured(python, side, "errors") for side, python in sides.items()}
    for turn in range(ROUNDS):
        say(f"times, round {turn + 1} of {ROUNDS}")
        for side, python in sides.items():
            for what, taken in measured(python, side, "times").items():
                figures[side][what] = min(taken, figures[side].get(what, taken))
    ours, theirs = figures["falaj"], figures["peer"]
    report("sketches", [Result(what, ours[what], theirs[what], 1.1) for what in ours])


def measured(python: Path, side: str, what: str) -> Figures:
    command = [python, "-W", "ignore", __file__, side, what]
    done = subprocess.run(command, env=environment(), check=True, stdout=subprocess.PIPE, text=True)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def measure(side: str, what: str) -> None:
    """Print the figures of one side."""
    make, ranks = falaj() if side == "falaj" else datasketches()
    print(json.dumps(errors(make, ranks) if what == "errors" else times(side, make)))


def falaj() -> tuple[Callable[[], Any], Ranks]:
    from falaj.records.quantiles.kll import KllSketch

    return KllSketch, lambda sketch, values: sketch.points().at_or_below(values) / sketch.count


def datasketches() -> tuple[Callable[[], Any], Ranks]:
    from datasketches import kll_doubles_sketch

    return lambda: kll_doubles_sketch(800), lambda sketch, values: sketch.get_cdf(values, True)[:-1]


# -------------------------------------------------------------------------------------------- errors


def errors(make: Callable[[], Any], ranks: Ranks) -> Figures:
    figures: Figures = {}
    for stream in STREAMS:
        worst = [stream_errors(make, ranks, stream, seed) for seed in range(TRIALS)]
        add_percentiles(figures, f"{stream} stream", worst)
    for name, sizes in PARTS.items():
        worst = [merge_errors(make, ranks, sizes, seed) for seed in range(TRIALS // 2)]
        add_percentiles(figures, f"merge of {name}", worst)
    return figures


def add_percentiles(figures: Figures, name: str, worst: list[tuple[float, float]]) -> None:
    for error, percent in zip(("rank", "share"), np.percentile(worst, 99, axis=0) * 100, strict=True):
        figures[f"{name}: error of {error}, %"] = float(percent)


def stream_errors(make: Callable[[], Any], ranks: Ranks, stream: str, seed: int) -> tuple[float, float]:
    """Sketch 1,000 to 100,000 values, so that compactions end anywhere."""
    rng = np.random.default_rng(seed)
    rows = STREAMS[stream](rng, int(10 ** rng.uniform(3, 5)))
    return worst_errors(ranks, fed(make, rows, batch=int(rng.choice([10, 100, 5_000]))), rows)


def merge_errors(
    make: Callable[[], Any], ranks: Ranks, sizes: Sequence[int], seed: int
) -> tuple[float, float]:
    rows = np.random.default_rng(seed).normal(size=sum(sizes))
    merged = make()
    for part in np.split(rows, np.cumsum(sizes)[:-1]):
        merged.merge(fed(make, part))
    return worst_errors(ranks, merged, rows)


def fed(make: Callable[[], Any], rows: Any, *, batch: int = 500) -> Any:
    sketch = make()
    for begin in range(0, len(rows), batch):
        sketch.update(rows[begin : begin + batch])
    return sketch


def worst_errors(ranks: Ranks, sketch: Any, rows: Any) -> tuple[float, float]:
    """Return the largest error of a rank, and of the share between two points."""
    values, counts = np.unique(rows, return_counts=True)
    wrong = np.asarray(ranks(sketch, values)) - np.cumsum(counts) / len(rows)
    above, below = max(0.0, wrong.max()), min(0.0, wrong.min())
    return max(above, -below), above - below


# --------------------------------------------------------------------------------------------- times


def times(side: str, make: Callable[[], Any]) -> Figures:
    rng = np.random.default_rng(1)
    figures: Figures = {}
    for batch in BATCHES:
        full = fed(make, rng.normal(size=1_000_000))
        figures[f"update with {batch:,} values, µs"] = update_us(full, batch)
    for batch in (16, 1_024):
        column = monitored() if side == "falaj" else make()
        figures[f"update of a column with {batch:,} values (peer: KLL alone), µs"] = update_us(column, batch)
    for size in (100, 1_000, 1_000_000):
        figures |= times_of_merges(make, side, size)
    return figures


def update_us(sketch: Any, batch: int) -> float:
    batches = list(np.random.default_rng(batch).normal(size=(max(4, 100_000 // batch), batch)))

    def update() -> None:
        for rows in batches:
            sketch.update(rows)

    return timed_us(update, turns=3) / len(batches)


def monitored() -> Any:
    from falaj.monitoring.sketches.sketchers import NumericSketcher

    return NumericSketcher("x")


def times_of_merges(make: Callable[[], Any], side: str, size: int) -> Figures:
    """Merge sketches of `size` values, and read the result."""
    write = "to_bytes" if side == "falaj" else "serialize"
    read = make.from_bytes if side == "falaj" else type(make()).deserialize  # type: ignore[attr-defined]
    sketches = [fed(make, np.random.default_rng(seed).normal(size=size)) for seed in range(64)]

    def merge(several: Sequence[Any]) -> bytes:
        merged = make()
        for sketch in several:
            merged.merge(sketch)
        return bytes(getattr(merged, write)())

    of_64 = timed_us(lambda: merge(sketches), turns=8)
    of_two = timed_us(lambda: merge(sketches[:2]), turns=200)
    stored = [getattr(sketch, write)() for sketch in sketches]
    of_64_stored = timed_us(lambda: merge([*map(read, stored)]), turns=8)
    return {
        f"merge of 64 sketches, one of {size:,} values, µs": of_64 / 64,
        f"merge of 64 stored sketches (peer: unchecked), one of {size:,} values, µs": of_64_stored / 64,
        f"merge of two sketches of {size:,} values, µs": of_two,
        f"serialization of {size:,} values, µs": timed_us(getattr(sketches[0], write), turns=200),
    }


def timed_us(work: Callable[[], Any], *, turns: int) -> float:
    """Return the CPU time of one call in the quickest of five rounds."""
    rounds = []
    for _ in range(5):
        began = time.process_time()
        for _ in range(turns):
            work()
        rounds.append((time.process_time() - began) / turns * 1e6)
    return min(rounds)


if __name__ == "__main__":
    measure(*sys.argv[1:]) if len(sys.argv) == 3 else main()
