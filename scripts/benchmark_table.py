"""Write the benchmark table of README.md from the files in benchmarks/results; `--check` only compares."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- benchmarks: begin, written by scripts/benchmark_table.py -->", "<!-- benchmarks: end -->"

SHOWN = (
    (
        "serving_rest",
        "requests/s at c=64, not logged",
        "REST predictions a second, 64 callers",
        "FastAPI + uvicorn + orjson",
    ),
    (
        "serving_rest",
        "requests/s at c=64",
        "the same, every prediction logged",
        "the same",
    ),
    ("features_join", "joins per CPU s, 90 rows per entity", "point-in-time joins a CPU second", "Feast"),
    (
        "startup",
        "CPU s to be up, beside mlflow server, one worker, no jobs",
        "CPU s to start",
        "mlflow server, leanest",
    ),
    (
        "startup",
        "MB (PSS) when up, beside mlflow server, one worker, no jobs",
        "memory when up, MB",
        "the same",
    ),
    (
        "api_load",
        "requests/s, 200 clients, 80 % reads",
        "requests a second of 200 clients, 80 % reads",
        "mlflow server",
    ),
    (
        "tracking_log",
        "points per CPU second of the server, log_batch of 1,000 by the client of MLflow",
        "metric points a CPU second of the server",
        "mlflow server",
    ),
    (
        "tracking_log",
        "points/s, log_batch of 1,000 by the client of MLflow",
        "metric points a second of one client of MLflow",
        "the same",
    ),
    (
        "tracking_search",
        "searches by the client of MLflow per CPU second of the server, 10,000 runs, metrics.auc > 0.9, a page of 100",
        "searches of 10,000 runs a CPU second of the server",
        "the same",
    ),
    ("cli", "CPU s of --help", "CPU s of `--help`", "mlflow"),
)
"""Benchmark, its result, what the table calls it, and the peer."""


def main() -> int:
    text = README.read_text()
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    new = f"{head}{BEGIN}\n{table()}\n{END}{tail}"
    if "--check" in sys.argv[1:]:
        return int(new != text)
    README.write_text(new)
    return 0


def table() -> str:
    """The rows of SHOWN, then training on a GPU; each with its date and machine."""
    rows = ["| what | Falaj | peer | ratio | measured |", "|---|---:|---:|---:|---|"]
    for bench, what, title, peer in SHOWN:
        kept = load(bench)
        (found,) = (result for result in kept["results"] if result["what"] == what)
        figures = f"{found['falaj']:,g} | {found['peer']:,g} ({peer}) | {found['ratio']:g}"
        rows.append(f"| {title} | {figures} | {kept['date']}, {machine(kept)} |")
    return "\n".join([*rows, *training_rows()])


def training_rows() -> list[str]:
    """`fj.fit` beside a loop that was tuned by hand and beside Lightning, on a GPU."""
    kept, rows = load("training_gpu"), []
    for model in kept["results"]:
        ours = median(model["rates"]["fit"])
        for name, peer in (("hand", "a loop tuned by hand"), ("lightning", "Lightning")):
            theirs = median(model["rates"][name])
            figures = f"{ours:,.0f} | {theirs:,.0f} ({peer}) | {model['goals'][name]['ratio']:.2f}"
            rows.append(f"| `fj.fit`, {model['model']}, {model['unit']} | {figures} | {machine(kept)} |")
    return rows


def load(bench: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{bench}.json").read_text()))


def machine(kept: dict[str, Any]) -> str:
    found = kept["machine"]
    return found if isinstance(found, str) else f"{found['cores']} cores {found['cpu']}"


if __name__ == "__main__":
    sys.exit(main())
