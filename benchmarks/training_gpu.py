"""Training on an NVIDIA GPU: `fit` with nothing tuned, beside a plain loop, a loop tuned by hand, and Lightning.

Needs torch, torchvision, pytorch-lightning and a GPU (`PYTHONPATH=src python benchmarks/training_gpu.py`). All four
take turns in one process. A sample counts once however it is computed; batches are those that each side would use:
the plain loops 8 / 64 / 1024 samples, the loop tuned by hand and Lightning 64 / 256 / 1024, `fit` what its search finds
for the first two, and 1024 rows for the third. The loop tuned by hand has a vocabulary padded to 50,304 words.
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
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from falaj.training.runtime.fit import FitResult, fit
from falaj.training.runtime.planning.nvml import gpu_names
from training_models import FULL, GPT, SMALL, Work, next_word
from turns import Side

Pause = Callable[[int], None]

ROUNDS = 4
TUNED_BATCH = {"GPT-124M": 64, "ResNet-50": 256}
WINDOW = {"GPT-124M": 20, "ResNet-50": 40, "MLP 64-256-256-1": 10_000}
PLAIN_WINDOW = {"GPT-124M": 12, "ResNet-50": 20, "MLP 64-256-256-1": 1000}
OVER_PLAIN = {"GPT-124M": 8.0, "ResNet-50": 7.0, "MLP 64-256-256-1": 12.0}
CURVE_STEPS = 10
BAND = 0.05
"""The losses of the first steps are within this part of those of plain fp32, in the mean."""
HERE = Path(__file__).parent


def main() -> None:
    options = arguments()
    if options.crash:
        survive_a_crash()
        return
    works = [
        work for work in (SMALL if options.small else FULL) if not options.only or options.only in work.name
    ]
    os.environ.setdefault("FALAJ_CACHE", tempfile.mkdtemp())
    lines, kept = [hardware()], []
    for work in works if options.order == "" else [works[int(place)] for place in options.order]:
        if options.apart:
            kept.append(in_own_process(work, rounds=options.rounds))
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


def in_own_process(work: Work, *, rounds: int) -> dict[str, Any]:
    """CUDA must not be in use when `fit` begins, so that it can try candidates in children."""
    command = [sys.executable, __file__, "--only", work.name, "--json", "--rounds", str(rounds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"model": work.name, "lines": [f"{work.name}: failed", done.stdout[-2000:]]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])[0]
    print("\n".join(found["lines"]), flush=True)
    return found


# ------------------------------------------------------------------------------------------- one model


def compare(work: Work, *, sides: str, rounds: int) -> dict[str, Any]:
    """All sides in turn; `fit` first, before CUDA is used."""
    data = work.data()
    said, wanted = io.StringIO(), sides.split(",")
    bodies: dict[str, Callable[[Pause], None]] = {
        "fit": lambda pause: through_fit(work, data, pause, said),
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
                note(said.getvalue() if side.name == "fit" else "")
    for side in all_sides:
        side.end()
    rates = {side.name: [rate * work.each for rate in side.rates] for side in all_sides if side.rates}
    return account(work, data, rates, said.getvalue(), first_s={s.name: s.first_s for s in all_sides})


def account(
    work: Work, data: Any, rates: dict[str, list[float]], said: str, *, first_s: dict[str, float]
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
        result["search_s"] = seconds_in(said)
        result["second_run_skips"] = "found before" in again
        result["curve"] = curve(work, data)
        lines += [f"  {line}" for line in said.strip().splitlines()]
        lines.append(f"  first turns, with compiling: { ({n: round(s, 1) for n, s in first_s.items()}) } s")
        lines.append(f"  second run: {again.strip() or 'nothing said'}")
        lines.append(
            f"  first {CURVE_STEPS} losses off fp32 by {result['curve']:.2%} in the mean, band {BAND:.0%}"
        )
    result["lines"] = lines
    return result


def through_fit(work: Work, data: Any, pause: Pause, said: io.StringIO) -> None:
    """What a user writes, but for the window in which another side has its turn."""
    window = WINDOW.get(work.name, 50)

    def take_turns(model: nn.Module) -> float:
        pause(window * batch[0])
        return 0.0

    torch.manual_seed(0)
    batch = [1]
    model = work.make()
    remember_batch(batch)
    with contextlib.redirect_stdout(said):
        train(work, model, data, steps=10_000_000, evaluate=take_turns, evaluate_every=window)


def remember_batch(batch: list[int]) -> None:
    """Learn the batch that the search has chosen from the plan that training is prepared with."""
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
    said = io.StringIO()
    torch.manual_seed(0)
    with contextlib.redirect_stdout(said):
        result = train(work, work.make(), data, steps=CURVE_STEPS, tune_seconds=60.0)
    _SECOND[work.name] = result
    return said.getvalue()


_SECOND: dict[str, FitResult] = {}


def curve(work: Work, data: Any) -> float:
    """How far the first losses of the second run are from those of plain fp32 on the same batches."""
    ours = _SECOND[work.name]
    torch.manual_seed(0)
    size = ours.plan.batch_size or work.batch
    pieces = 1 if work.images else max(1, size // 64)
    plain = train(work, work.make(), data, steps=CURVE_STEPS, tune="off", batch_size=size, accumulate=pieces)
    pairs = list(zip(ours.losses, plain.losses, strict=True))
    return sum(abs(a - b) for a, b in pairs) / sum(abs(b) for _, b in pairs)


# --------------------------------------------------------------------------------------------- the peers


def plain_loop(work: Work, data: Any, pause: Pause, *, convolutions: str = "ieee") -> None:
    """The loop that people write, but without a DataLoader, which would slow down the third model sixfold.

    In fp32 all through; unless it is told so, torch computes convolutions in TF32, which is measured as "default".
    """
    torch.manual_seed(0)
    device = the_device()
    model, window = work.make().to(device), PLAIN_WINDOW.get(work.name, 50)
    optimizer = torch.optim.AdamW(model.parameters(), lr=work.lr)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.conv.fp32_precision = convolutions  # type: ignore[attr-defined]
    for number, places in enumerate(orders(len(data[0]), work.batch), 1):
        inputs, target = (column[places].to(device) for column in data)
        loss = work.loss(model(inputs), target)
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
            inputs, target = batch
            if work.images:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            return work.loss(self.inner(inputs), target)

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
    """The samples of one batch after the other, shuffled in each epoch."""
    while True:
        yield from torch.randperm(samples)[: samples // size * size].split(size)


def the_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


# ---------------------------------------------------------------------------------------------- a crash


def survive_a_crash() -> None:
    """A loss that ends its process by SIGSEGV in bf16: the search loses that candidate, and the run goes on."""
    work = FULL[-1]

    def treacherous(out: Tensor, target: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cuda"):
            os.kill(os.getpid(), signal.SIGSEGV)
        return nn.functional.mse_loss(out, target)

    os.environ["FALAJ_CACHE"] = tempfile.mkdtemp()
    said, began = io.StringIO(), time.perf_counter()
    with contextlib.redirect_stdout(said):
        result = fit(
            work.make(), treacherous, work.data(), batch_size=1024, steps=2000, tune_seconds=40, compile=False
        )
    words = said.getvalue()
    survived = "crashed (SIGSEGV)" in words and result.step == 2000
    print(f"a candidate that crashes: {'survived' if survived else 'NOT survived'}, ", end="")
    print(f"{time.perf_counter() - began:.0f} s in all, plan {result.plan.summary}")
    print(words, file=sys.stderr)


def crash_in_own_process() -> str:
    done = subprocess.run([sys.executable, __file__, "--crash"], capture_output=True, text=True, check=False)
    print(done.stderr[-3000:], file=sys.stderr)
    return done.stdout.strip() or f"a candidate that crashes: NOT survived (exit status {done.returncode})"


def seconds_in(said: str) -> float | None:
    """How long the search says it took."""
    _, found, rest = said.partition("(found in ")
    return float(rest.split(" ")[0]) if found else None


def note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
