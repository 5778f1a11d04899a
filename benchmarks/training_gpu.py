"""Training on an NVIDIA GPU: `fit` with its defaults against a plain loop, a hand-tuned loop, and Lightning.

Needs torch, torchvision, pytorch-lightning and a GPU: `PYTHONPATH=src python benchmarks/training_gpu.py`. All four
alternate in one process. Each uses its own batch size: plain loops 8 / 64 / 1024 samples, hand-tuned and Lightning 64 /
256 / 1024, `fit` what its search finds (1024 for the third model). The hand-tuned loop pads the vocabulary to 50,304.
The recommendation model (DLRM) has batches of 4,096 on every side; by hand the fastest of six loops counts. It needs
torch alone:

    PYTHONPATH=src python benchmarks/training_gpu.py --only DLRM --sides fit,plain,hand
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from falaj.training.runtime.fit import FitResult, fit
from falaj.training.runtime.planning.nvml import gpu_names
from training_models import FULL, GPT, RECOMMENDER, SMALL, SMALL_RECOMMENDER, Work, next_word
from turns import Side

Pause = Callable[[int], None]

ROUNDS = 4
TUNED_BATCH = {"GPT-124M": 64, "ResNet-50": 256}
WINDOW = {"GPT-124M": 20, "ResNet-50": 40, "MLP 64-256-256-1": 10_000, "DLRM": 2000}
PLAIN_WINDOW = {"GPT-124M": 12, "ResNet-50": 20, "MLP 64-256-256-1": 1000, "DLRM": 500}
OVER_PLAIN = {"GPT-124M": 8.0, "ResNet-50": 7.0, "MLP 64-256-256-1": 12.0}
CURVE_STEPS = 10
BAND = 0.05
"""Mean relative difference that is allowed between the first losses and those of plain fp32."""
HERE = Path(__file__).parent


def main() -> None:
    options = arguments()
    if options.crash:
        survive_a_crash()
        return
    every = (*SMALL, SMALL_RECOMMENDER) if options.small else (*FULL, RECOMMENDER)
    works = [work for work in every if not options.only or options.only in work.name]
    os.environ.setdefault("FALAJ_CACHE", tempfile.mkdtemp())
    lines, kept = [hardware()], []
    for work in works if options.order == "" else [works[int(place)] for place in options.order]:
        if options.apart:
            kept.append(in_own_process(work, sides=options.sides, rounds=options.rounds))
            lines += kept[-1].pop("lines")
            keep(options.out, lines, kept)
        else:
            kept.append(compare(work, sides=options.sides, rounds=options.rounds))
            lines += kept[-1]["lines"]
    if options.apart:
        lines.append(crash_in_own_process())
    print("\n".join(lines) if options.apart or not options.json else json.dumps(kept))
    keep(options.out, lines, kept)


def keep(folder: str, lines: list[str], kept: list[dict[str, Any]]) -> None:
    if not folder:
        return
    Path(folder, "training_gpu.txt").write_text("\n".join(lines) + "\n")
    crash = next((line for line in lines if line.startswith("a candidate that crashes")), None)
    result = {"bench": "training_gpu", "machine": lines[0], "results": kept, "crash": crash}
    Path(folder, "training_gpu.json").write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="models whose name has this in it")
    parser.add_argument("--sides", default="fit,plain,default,hand,lightning")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--small", action="store_true", help="small models, to try the benchmark itself")
    parser.add_argument(
        "--apart", action="store_true", help="a process for each model, and all goals checked"
    )
    parser.add_argument("--order", default="", help="the models by number, such as 102")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--crash", action="store_true")
    parser.add_argument("--out", default="", help="the folder for the results")
    return parser.parse_args()


def hardware() -> str:
    names = ", ".join(gpu_names())
    return f"{datetime.now(UTC):%Y-%m-%d}, {names or 'no GPU'}, torch {torch.__version__}, {os.cpu_count()} CPU cores"


def in_own_process(work: Work, *, sides: str, rounds: int) -> dict[str, Any]:
    """Run in a separate process, since CUDA must not be in use when `fit` tries candidates in children."""
    command = [sys.executable, __file__, "--only", work.name, "--json", "--rounds", str(rounds)]
    command += ["--sides", sides]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"model": work.name, "lines": [f"{work.name}: failed", done.stdout[-2000:]]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])[0]
    print("\n".join(found["lines"]), flush=True)
    return found


# ------------------------------------------------------------------------------------------- one model


def compare(work: Work, *, sides: str, rounds: int) -> dict[str, Any]:
    """Measure all sides in alternation; `fit` first, before CUDA is used."""
    data = work.data()
    output, wanted = io.StringIO(), sides.split(",")
    bodies: dict[str, Callable[[Pause], None]] = {
        "fit": lambda pause: through_fit(work, data, pause, output),
        "plain": lambda pause: plain_loop(work, data, pause),
        "default": lambda pause: plain_loop(work, data, pause, convolutions="tf32"),
        "hand": lambda pause: tuned_by_hand(work, data, pause),
        "lightning": lambda pause: with_lightning(work, data, pause),
    }
    if not work.images:
        del bodies["default"]
    all_sides = [Side(name, bodies[name]) for name in bodies if name in wanted]
    for number in range(rounds + 1):
        for side in all_sides if number % 2 == 0 else all_sides[::-1]:
            side.turn()
            if number and side.error:
                note(f"{work.name} {side.name}: {side.error[-1500:]}")
            if number == 0:
                note(f"{work.name} {side.name}: first turn {side.first_s:.1f} s {side.error[-1500:]}")
                note(output.getvalue() if side.name == "fit" else "")
    for side in all_sides:
        side.end()
    rates = {side.name: [rate * work.each for rate in side.rates] for side in all_sides if side.rates}
    return account(work, data, rates, output.getvalue(), first_s={s.name: s.first_s for s in all_sides})


def account(
    work: Work, data: Any, rates: dict[str, list[float]], output: str, *, first_s: dict[str, float]
) -> dict[str, Any]:
    lines = [
        "",
        f"{work.name}, {work.unit}/s: median (lowest to highest) of {len(next(iter(rates.values())))} rounds",
    ]
    for name, found in rates.items():
        lines.append(f"  {name:<10} {median(found):>12,.0f}  ({min(found):,.0f} to {max(found):,.0f})")
    middle = {name: median(found) for name, found in rates.items()}
    goals = {"hand": 0.95, "lightning": 1.0, "plain": OVER_PLAIN.get(work.name, 0.0)}
    met = {}
    for name, goal in goals.items():
        if name in middle and "fit" in middle:
            ratio = middle["fit"] / middle[name]
            met[name] = {"ratio": round(ratio, 3), "goal": goal, "met": ratio >= goal}
            lines.append(
                f"  fit / {name}: {ratio:.2f}, goal ≥ {goal:g}: {'met' if ratio >= goal else 'NOT met'}"
            )
    result: dict[str, Any] = {"model": work.name, "unit": f"{work.unit}/s", "rates": rates, "goals": met}
    if "fit" in rates:
        again = second_run(work, data)
        result["search_s"] = seconds_in(output)
        result["second_run_skips"] = "from the cache" in again
        result["curve"] = curve(work, data)
        lines += [f"  {line}" for line in output.strip().splitlines()]
        lines.append(f"  first turns, with compiling: { ({n: round(s, 1) for n, s in first_s.items()}) } s")
        lines.append(f"  second run: {again.strip() or 'nothing output'}")
        lines.append(
            f"  first {CURVE_STEPS} losses off fp32 by {result['curve']:.2%} in the mean, band {BAND:.0%}"
        )
    result["lines"] = lines
    return result


def through_fit(work: Work, data: Any, pause: Pause, output: io.StringIO) -> None:
    """Train as a user would, with pauses in which other sides run."""
    window = WINDOW.get(work.name, 50)

    def take_turns(model: nn.Module) -> float:
        pause(window * batch[0])
        return 0.0

    torch.manual_seed(0)
    batch = [1]
    model = work.make()
    remember_batch(batch)
    with contextlib.redirect_stdout(output):
        train(work, model, data, steps=10_000_000, evaluate=take_turns, evaluate_every=window)


def remember_batch(batch: list[int]) -> None:
    """Record the batch size that the search has chosen."""
    import falaj.training.runtime.fit as fitting

    prepare = fitting.prepare

    def watched(*args: Any, **options: Any) -> Any:
        training = prepare(*args, **options)
        batch[0] = training.plan.batch_size
        return training

    fitting.prepare = watched


def train(work: Work, model: nn.Module, data: Any, **options: Any) -> FitResult:
    size: Any = "auto" if work.name in TUNED_BATCH else work.batch
    return fit(model, work.loss, data, **{"batch_size": size, "lr": work.lr, "drop_last": True, **options})


def second_run(work: Work, data: Any) -> str:
    output = io.StringIO()
    torch.manual_seed(0)
    with contextlib.redirect_stdout(output):
        result = train(work, work.make(), data, steps=CURVE_STEPS, tune_seconds=60.0)
    _SECOND[work.name] = result
    return output.getvalue()


_SECOND: dict[str, FitResult] = {}


def curve(work: Work, data: Any) -> float:
    """Return how far the first losses of the second run are from those of plain fp32 on the same batches."""
    ours = _SECOND[work.name]
    torch.manual_seed(0)
    size = ours.plan.batch_size or work.batch
    pieces = 1 if work.images else max(1, size // 64)
    plain = train(work, work.make(), data, steps=CURVE_STEPS, tune="off", batch_size=size, accumulate=pieces)
    pairs = list(zip(ours.losses, plain.losses, strict=True))
    return sum(abs(a - b) for a, b in pairs) / sum(abs(b) for _, b in pairs)


# ------------------------------------------------------------------------------------------------- peers


def plain_loop(work: Work, data: Any, pause: Pause, *, convolutions: str = "ieee") -> None:
    """A plain loop without a DataLoader, which would slow down the third model sixfold.

    In fp32; by default torch computes convolutions in TF32, which is measured as "default".
    """
    torch.manual_seed(0)
    device = the_device()
    model, window = work.make().to(device), PLAIN_WINDOW.get(work.name, 50)
    optimizer = torch.optim.AdamW(model.parameters(), lr=work.lr)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.conv.fp32_precision = convolutions  # type: ignore[attr-defined]
    for number, places in enumerate(orders(len(data[0]), work.batch), 1):
        *inputs, target = (column[places].to(device) for column in data)
        loss = work.loss(model(*inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number % window == 0:
            pause(window * work.batch)


def tuned_by_hand(work: Work, data: Any, pause: Pause) -> None:
    torch.manual_seed(0)
    device = the_device()
    if work.name.startswith("MLP"):
        graphed_by_hand(work, data, pause)
        return
    if "DLRM" in work.name:
        compiled_by_hand(work, data, pause)
        return
    model = (GPT(words=50_304) if work.loss is next_word and work.name == "GPT-124M" else work.make()).to(
        device
    )
    if work.images:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    size, window = TUNED_BATCH.get(work.name, work.batch), WINDOW.get(work.name, 50)
    optimizer = torch.optim.AdamW(model.parameters(), lr=work.lr, fused=device == "cuda")
    compiled = torch.compile(model)
    columns = [column.to(device) for column in data]
    number = 0
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # type: ignore[attr-defined]
    while True:
        places = torch.randint(0, len(columns[0]), (size,), device=device)
        inputs, target = (column[places] for column in columns)
        if work.images:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        with torch.autocast(device, torch.bfloat16):
            loss = work.loss(compiled(inputs), target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        number += 1
        if number % window == 0:
            pause(window * size)


def compiled_by_hand(work: Work, data: Any, pause: Pause) -> None:
    """The fastest of several compiled loops with a fused optimizer: bf16 or TF32, without and with CUDA graphs."""
    device, window = the_device(), WINDOW.get(work.name, 50)
    columns = [column.to(device) for column in data]
    torch.set_float32_matmul_precision("high")
    forms = ("default", "reduce-overhead", "whole step as a graph") if device == "cuda" else ("default",)
    own_graphs_in_this_thread()
    took: dict[tuple[bool, str], float] = {}
    for form in forms:
        for half in (True, False):
            name = f"{work.name} by hand, {'bf16' if half else 'tf32'}, {form}"
            try:
                took[half, form] = seconds_per_step(steps_by_hand(work, columns, half=half, form=form))
                note(f"{name}: {1e3 * took[half, form]:.2f} ms")
            except Exception as failure:
                note(f"{name}: {type(failure).__name__}: {str(failure)[:300]}")
    half, form = min(took, key=lambda each: took[each])
    chosen = steps_by_hand(work, columns, half=half, form=form)
    while True:
        for _ in range(window):
            next(chosen)
        pause(window * work.batch)


def steps_by_hand(work: Work, columns: list[Tensor], *, half: bool, form: str) -> Iterator[None]:
    """Train by a compiled loop, a step at a time."""
    device, is_graph = columns[0].device.type, form == "whole step as a graph"
    torch.manual_seed(0)
    model = work.make().to(device)
    fused = {"fused": True, "capturable": is_graph} if device == "cuda" else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=work.lr, **fused)
    mode = {"mode": form} if form == "reduce-overhead" else {}
    compiled = torch.compile(lambda *inputs, target: work.loss(model(*inputs), target), **mode)
    places = torch.zeros(work.batch, dtype=torch.int64, device=device)

    def step() -> None:
        *inputs, target = (column[places] for column in columns)
        with torch.autocast(device, torch.bfloat16, enabled=half, cache_enabled=not is_graph):
            loss = compiled(*inputs, target=target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    act: Callable[[], object] = captured(step) if is_graph else step
    while True:
        places.random_(0, len(columns[0]))
        if form == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        act()
        yield


def captured(step: Callable[[], None]) -> Callable[[], object]:
    """Return `step` as a CUDA graph."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(5):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay


def own_graphs_in_this_thread() -> None:
    """Prepare the graphs of mode="reduce-overhead", which torch prepares in the main thread only."""
    if not torch.cuda.is_available():
        return
    from torch._inductor import cudagraph_trees as trees

    for name, value in (
        ("tree_manager_containers", {}),
        ("tree_manager_locks", defaultdict(threading.Lock)),
    ):
        setattr(trees.local, name, value)
        torch._C._stash_obj_in_tls(name, value)  # type: ignore[attr-defined]


def seconds_per_step(steps: Iterator[None], *, warmup: int = 20, count: int = 100) -> float:
    for number in range(warmup + count):
        if number == warmup:
            synchronize()
            began = time.perf_counter()
        next(steps)
    synchronize()
    return (time.perf_counter() - began) / count


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def graphed_by_hand(work: Work, data: Any, pause: Pause) -> None:
    """The whole step in a CUDA graph."""
    device = "cuda"
    torch.set_float32_matmul_precision("high")
    model = work.make().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=work.lr, fused=True, capturable=True)
    columns = [column.to(device) for column in data]
    places = torch.zeros(work.batch, dtype=torch.int64, device=device)

    def step() -> Tensor:
        inputs, target = (column[places] for column in columns)
        optimizer.zero_grad(set_to_none=True)
        loss = work.loss(model(inputs), target)
        loss.backward()
        optimizer.step()
        return loss

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    number, window = 0, WINDOW[work.name]
    order = torch.randperm(len(columns[0]), device=device)
    while True:
        start = number * work.batch % (len(order) - work.batch)
        places.copy_(order[start : start + work.batch])
        graph.replay()
        number += 1
        if number % window == 0:
            pause(window * work.batch)


def with_lightning(work: Work, data: Any, pause: Pause) -> None:
    import warnings

    import pytorch_lightning as lightning

    warnings.filterwarnings("ignore")
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # type: ignore[attr-defined]
    torch.manual_seed(0)
    size, window = TUNED_BATCH.get(work.name, work.batch), WINDOW.get(work.name, 50)
    window = 100 if work.name.startswith("MLP") else window
    inner = work.make()
    if work.images:
        inner = inner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.compile(inner)

        def training_step(self, batch: Any, _: int) -> Tensor:
            *inputs, target = batch
            if work.images:
                inputs = [each.contiguous(memory_format=torch.channels_last) for each in inputs]
            return work.loss(self.inner(*inputs), target)

        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step % window == 0:
                pause(window * size)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=work.lr, fused=torch.cuda.is_available())

    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*data),
        size,
        shuffle=True,
        drop_last=True,
        num_workers=12,
        pin_memory=True,
        persistent_workers=True,
    )
    trainer = lightning.Trainer(
        max_steps=-1,
        max_epochs=-1,
        accelerator="auto",
        devices=1,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        benchmark=True,
    )
    trainer.fit(Module(), loader)


def orders(samples: int, size: int) -> Iterator[Tensor]:
    """Yield the samples of one batch after the other, shuffled in each epoch."""
    while True:
        yield from torch.randperm(samples)[: samples // size * size].split(size)


def the_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


# ---------------------------------------------------------------------------------------------- a crash


def survive_a_crash() -> None:
    """A loss that crashes by SIGSEGV in bf16: the search discards that candidate, and the run continues."""
    work = FULL[-1]

    def treacherous(out: Tensor, target: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cuda"):
            os.kill(os.getpid(), signal.SIGSEGV)
        return nn.functional.mse_loss(out, target)

    os.environ["FALAJ_CACHE"] = tempfile.mkdtemp()
    output, began = io.StringIO(), time.perf_counter()
    with contextlib.redirect_stdout(output):
        result = fit(
            work.make(), treacherous, work.data(), batch_size=1024, steps=2000, tune_seconds=40, compile=False
        )
    words = output.getvalue()
    survived = "crashed (SIGSEGV)" in words and result.step == 2000
    print(f"a candidate that crashes: {'survived' if survived else 'NOT survived'}, ", end="")
    print(f"{time.perf_counter() - began:.0f} s in all, plan {result.plan.summary}")
    print(words, file=sys.stderr)


def crash_in_own_process() -> str:
    done = subprocess.run([sys.executable, __file__, "--crash"], capture_output=True, text=True, check=False)
    print(done.stderr[-3000:], file=sys.stderr)
    return done.stdout.strip() or f"a candidate that crashes: NOT survived (exit status {done.returncode})"


def seconds_in(output: str) -> float | None:
    """Return how long the search took by its own report."""
    _, found, rest = output.partition("(found in ")
    return float(rest.split(" ")[0]) if found else None


def note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
