"""Estimated memory of training, made without a GPU, against `torch.cuda.max_memory_allocated` of a plain loop.

Three eager AdamW steps for each row, in separate processes; the peak of `fit` with the same plan is shown for
information. Needs torch (ResNet-50: torchvision):

PYTHONPATH=src python benchmarks/training_memory.py [--estimate-only] [--only GPT MLP] [--precision fp32]

Every row is printed and stored as soon as it is known. With --together all rows are measured in one process, without
`fit`, in a minute or two.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from training_models import FULL, Data, Work, pictures, rows, texts

BATCHES = {"GPT-124M": (4, 8, 32), "ResNet-50": (32, 64, 256), "MLP 64-256-256-1": (1024, 16_384, 262_144)}
PRECISIONS = ("fp32", "bf16")
STEPS = 3
WITHIN = 0.10
GIB = 1 << 30
CHILD_S = 240
RESULTS = Path(__file__).parent / "results" / "training_memory.json"


def main() -> None:
    options = arguments()
    if options.measure:
        print(json.dumps(measured(*options.measure)), flush=True)
        return
    if options.measure_all:
        for row in chosen(options):
            print(json.dumps(of_plain_loop(*row)), flush=True)
        return
    if options.estimate:
        for row in chosen(options):
            print(json.dumps(estimated(*row)), flush=True)
        return
    table = {}
    for row, found in zip(chosen(options), estimates(options), strict=False):
        table[row] = found
        say(f"estimate  {spelled(row)}  {shown(found)}")
    if options.estimate_only:
        return
    if not torch.cuda.is_available():
        say("there is no GPU here to measure on")
        return
    say(f"measuring on {gpu()}, torch {torch.__version__}")
    results: list[dict[str, Any]] = []
    for row, seen in measurements(options):
        say(f"measured  {spelled(row)}  {json.dumps(seen)}")
        found = table.get(row, {})
        if "bytes" in found and "bytes" in seen:
            results.append(result(row, found, seen))
            keep(results)
    print(json.dumps({"bench": "training_memory", "results": results}, ensure_ascii=False), flush=True)


def keep(results: list[dict[str, Any]]) -> None:
    last = {"bench": "training_memory", "machine": f"{gpu()}, torch {torch.__version__}", "results": results}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(last, indent=2, ensure_ascii=False) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=[], help="beginnings of names of models")
    parser.add_argument("--precision", nargs="*", default=list(PRECISIONS))
    parser.add_argument("--estimate-only", action="store_true")
    parser.add_argument("--estimate", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--together", action="store_true", help="measure all rows in one process")
    parser.add_argument("--measure-all", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


Row = tuple[str, int, str]


def chosen(options: argparse.Namespace) -> list[Row]:
    return [
        (name, batch, precision)
        for precision in options.precision
        for name, batches in BATCHES.items()
        if not options.only or name.startswith(tuple(options.only))
        for batch in batches
    ]


def result(row: Row, found: dict[str, Any], seen: dict[str, Any]) -> dict[str, Any]:
    """Return the line of a row; the goal is met if the estimate is within a tenth of the measurement."""
    ratio = found["bytes"] / seen["bytes"]
    line = {
        "what": f"{spelled(row)}: peak GiB, estimated (peer: measured), within 10 %",
        "falaj": round(found["bytes"] / GIB, 4),
        "peer": round(seen["bytes"] / GIB, 4),
        "ratio": round(ratio, 4),
        "goal": 1 + WITHIN,
        "met": abs(ratio - 1) <= WITHIN,
    }
    say(f"ratio     {spelled(row)}  {ratio:.4f}  {'met' if line['met'] else 'NOT met'}")
    if "fit_bytes" in seen:
        ours = found["bytes"] + found["data_bytes"]
        say(f"          {spelled(row)}  with data, beside fit: {ours / seen['fit_bytes']:.4f}")
        line["fit"] = {"estimated": round(ours / GIB, 4), "measured": round(seen["fit_bytes"] / GIB, 4)}
    return line


# ----------------------------------------------------------------------------------------- estimating


def estimates(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return all estimates, from one process without a GPU and with an empty cache."""
    command = ["--estimate", "--only", *options.only, "--precision", *options.precision]
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "FALAJ_CACHE": cache}
        ran = run(command, env=env, limit_s=900)
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    if ran.returncode:
        say(f"the estimates ended early: {ran.stderr.strip()[-1500:]}")
    return lines


def estimated(name: str, batch: int, precision: str) -> dict[str, Any]:
    from falaj.training.runtime.memory.estimate import estimate

    if torch.cuda.is_available():
        return {"failed": "this process sees a GPU"}
    began = time.perf_counter()
    try:
        work = work_of(name)
        found = estimate(
            *(work.make(), work.loss, samples(name, batch)),
            batch_size=batch,
            precision=precision,  # type: ignore[arg-type]
            device="cuda",
        )
    except Exception as failure:  # the other rows are still wanted
        return {"failed": f"{type(failure).__name__}: {failure}"[:500]}
    kept = {each: value for each, value in found.facts().items() if each != "ways"}
    return {"bytes": found.peak_bytes, "seconds": round(time.perf_counter() - began, 2), **kept}


# ------------------------------------------------------------------------------------------ measuring


def measurements(options: argparse.Namespace) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Yield each row with its measurement, as it arrives."""
    if not options.together:
        for row in chosen(options):
            yield row, child("--measure", row[0], str(row[1]), row[2])
        return
    command = ["--measure-all", "--only", *options.only, "--precision", *options.precision]
    ran = run(command, env=dict(os.environ), limit_s=CHILD_S)
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    if ran.returncode:
        say(f"the measurements ended early: {ran.stderr.strip()[-1500:]}")
    yield from zip(chosen(options), lines, strict=False)


def of_plain_loop(name: str, batch: int, precision: str) -> dict[str, Any]:
    """Return the peak of the plain loop from here on."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        return {"before_bytes": before, **plain_loop(name, batch, precision)}
    except Exception as failure:  # the other rows are still wanted
        return {"failed": f"{type(failure).__name__}: {failure}"[:500]}


def measured(name: str, batch: str, precision: str) -> dict[str, Any]:
    """Return the peak of the plain loop, and of `fit`, in this process."""
    size = int(batch)
    found = of_plain_loop(name, size, precision)
    try:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        found["before_fit_bytes"] = torch.cuda.memory_allocated()
        through_fit(name, size, precision)
        found["fit_bytes"] = torch.cuda.max_memory_allocated()
    except Exception as failure:
        found["fit_failed"] = f"{type(failure).__name__}: {failure}"[:500]
    return found


def plain_loop(name: str, batch: int, precision: str) -> dict[str, Any]:
    torch.manual_seed(0)
    work = work_of(name)
    model = work.make().cuda().train()
    inputs, target = (column[:batch].cuda() for column in samples(name, batch))
    optimizer = torch.optim.AdamW(model.parameters(), lr=work.lr)
    peaks = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            loss = work.loss(model(inputs), target)
        loss.backward()  # type: ignore[no-untyped-call]
        passes = torch.cuda.max_memory_allocated()
        optimizer.step()
        torch.cuda.synchronize()
        peaks.append([passes, torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()])
    stats = torch.cuda.memory_stats()
    return {
        "bytes": torch.cuda.max_memory_allocated(),
        "requested": stats.get("requested_bytes.all.peak"),
        "reserved": torch.cuda.max_memory_reserved(),
        "passes_step_after": peaks,
        "loss": float(loss.detach()),
    }


def through_fit(name: str, batch: int, precision: str) -> None:
    from falaj.training.runtime.fit import fit

    work = work_of(name)
    torch.manual_seed(0)
    fit(
        work.make(),
        work.loss,
        samples(name, batch),
        batch_size=batch,
        lr=work.lr,
        steps=STEPS,
        precision=precision,  # type: ignore[arg-type]
        tune="off",
        device="cuda",
    )


# -------------------------------------------------------------------------------------------- sharing


def work_of(name: str) -> Work:
    return next(work for work in FULL if work.name == name)


def samples(name: str, batch: int) -> Data:
    """Return no more samples than one batch; their values do not matter."""
    if name.startswith("GPT"):
        return texts(batch, words=50_257, length=1024)
    return pictures(batch, size=224, classes=1000) if name.startswith("ResNet") else rows(batch)


def child(*command: str) -> dict[str, Any]:
    ran = run(list(command), env=dict(os.environ), limit_s=CHILD_S)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return {"failed": f"exit status {ran.returncode}: {ran.stderr.strip()[-800:]}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def run(command: Sequence[str], *, env: dict[str, str], limit_s: float) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, __file__, *command]
    try:
        return subprocess.run(
            arguments, env=env, timeout=limit_s, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired as late:
        partial_output = late.stdout or b""
        text = partial_output if isinstance(partial_output, str) else partial_output.decode(errors="replace")
        return subprocess.CompletedProcess(arguments, 124, text, f"did not end within {limit_s:.0f} s")


def gpu() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def spelled(row: Row) -> str:
    return f"{row[0]}, batch {row[1]}, {row[2]}"


def shown(found: dict[str, Any]) -> str:
    if "bytes" not in found:
        return str(found.get("failed"))
    parts = ", ".join(
        f"{each.removesuffix('_bytes')} {found[each] / GIB:.3f}" for each in found if each.endswith("_bytes")
    )
    return f"{found['bytes'] / GIB:.4f} GiB in {found['seconds']} s ({parts})"


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
