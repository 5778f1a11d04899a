"""Checks that need an NVIDIA GPU, each in its own process.

Needs torch and a GPU: `PYTHONPATH=src python benchmarks/gpu_checks.py [NAME …]`; the batch prediction and the
optimization need Falaj's dependencies as well, installed where their processes find them. It prints a line for each
check, and exits with 1 if one failed. A transcript is in results/gpu_checks.txt.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from falaj.training.runtime.data.batches import sorted_positions
from falaj.training.runtime.fit import FitResult, fit
from falaj.training.runtime.planning.nvml import is_cuda_available
from falaj.training.runtime.planning.plan import Plan

LIMIT_S = 150
GIB = 1 << 30
DEVICE = "cuda" if is_cuda_available() else "cpu"
CHECKS: dict[str, Callable[[], str]] = {}


def check(act: Callable[[], str]) -> Callable[[], str]:
    CHECKS[act.__name__] = act
    return act


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--alone":
        os.environ["FALAJ_CACHE"] = tempfile.mkdtemp()
        print(CHECKS[sys.argv[2]](), flush=True)
        return
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU here")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
    failed = [name for name in sys.argv[1:] or CHECKS if not passes(name)]
    raise SystemExit(1 if failed else 0)


def passes(name: str) -> bool:
    began = time.perf_counter()
    command = [sys.executable, __file__, "--alone", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        words = (
            done.stdout.strip()
            if done.returncode == 0
            else done.stdout[-1500:] + " FAILED " + done.stderr[-2500:]
        )
    except subprocess.TimeoutExpired:
        words = f"FAILED: did not end within {LIMIT_S} s"
    print(f"{name.replace('_', ' ')}: {words} ({time.perf_counter() - began:.0f} s)", flush=True)
    return "FAILED" not in words


# -------------------------------------------------------------------------------------------- models and data


class Rows:
    """A dataset whose samples are read one by one."""

    def __init__(self, count: int = 4096) -> None:
        self.rows = torch.randn(count, 64, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index], self.rows[index, :8].sum().view(1)


def net(width: int = 256, *, dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(64, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, width), nn.GELU()
    return nn.Sequential(*layers, nn.Linear(width, 1))


def mse(out: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(out.float(), target)


def train(model: nn.Module, data: Any, **options: Any) -> tuple[FitResult, str]:
    output = io.StringIO()
    given = {
        "batch_size": 256,
        "steps": 40,
        "lr": 3e-3,
        "device": DEVICE,
        "tune": "off",
        "seed": 1,
        **options,
    }
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        result = fit(model, given.pop("loss", mse), data, **given)
    return result, output.getvalue()


def columns(count: int = 4096) -> tuple[Tensor, Tensor]:
    rows = Rows(count).rows
    return rows, rows[:, :8].sum(1, keepdim=True)


def apart(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def outcome(holds: bool, words: str) -> str:
    return words if holds else f"FAILED: {words}"


# ---------------------------------------------------------------------------------------------------- checks


@check
def order_of_an_epoch() -> str:
    """The order of an epoch is the same from the GPU as from the CPU."""
    took = {}
    for device in ("cpu", "cuda", "cpu", "cuda"):
        began = time.perf_counter()
        order = sorted_positions(1_048_576, 3, 7, device=device).cpu()
        took[device] = order, time.perf_counter() - began
    (ours, cpu_s), (theirs, gpu_s) = took["cpu"], took["cuda"]
    words = f"a million samples in {1e3 * cpu_s:.0f} ms on the CPU, {1e3 * gpu_s:.1f} ms on the GPU"
    return outcome(ours.equal(theirs), words)


@check
def a_graph_fed_from_outside() -> str:
    """Batches from the host go into the graph's slots; the losses are those without a graph."""
    plain, _ = train(net(), Rows(), tune=Plan(workers=0, fused=True))
    graphed, output = train(net(), Rows(), tune=Plan(workers=0, fused=True, graph=True))
    resident, _ = train(net(), columns(), tune=Plan(fused=True, graph=True))
    off = apart(plain.losses, graphed.losses), apart(plain.losses, resident.losses)
    fine = max(off) < 1e-4 and "cannot be captured as a CUDA graph" not in output
    return outcome(
        fine, f"losses differ by {off[0]:.1e}, with resident data by {off[1]:.1e} {output.strip()}"
    )


@check
def a_graph_with_workers() -> str:
    plain, _ = train(net(), Rows(), tune=Plan(workers=0))
    graphed, output = train(net(), Rows(), tune=Plan(workers=2, graph=True))
    off = apart(plain.losses, graphed.losses)
    return outcome(off < 1e-4 and "cannot" not in output, f"losses differ by {off:.1e} {output.strip()}")


@check
def checkpoints_beside_a_graph() -> str:
    """A checkpoint of each step is pending while the graph is captured; the run resumes from one of them."""
    alone, _ = train(net(1024), columns(), tune=Plan(graph=True, fused=True))
    with tempfile.TemporaryDirectory() as folder:
        options = {"tune": Plan(graph=True, fused=True), "checkpoint_every": 1, "checkpoint_keep": 50}
        kept, output = train(net(1024), columns(), run=Path(folder, "a"), **options)
        train(net(1024), columns(), run=Path(folder, "b"), **{**options, "steps": 20})
        resumed, _ = train(net(1024), columns(), run=Path(folder, "b"), **options)
    off = apart(alone.losses, kept.losses), apart(alone.losses[20:], resumed.losses)
    fine = max(off) < 1e-4 and resumed.resumed_from == 20 and "cannot" not in output
    return outcome(fine, f"losses differ by {off[0]:.1e}, resumed by {off[1]:.1e} {output.strip()}")


@check
def the_bytes_of_a_checkpoint() -> str:
    """The state staged on a separate stream is that of its step, not of a later one; in both layouts."""
    torch.manual_seed(0)
    images = torch.randn(512, 3, 32, 32), torch.randn(512, 1)

    def model() -> nn.Module:
        torch.manual_seed(0)
        convolutions = nn.Conv2d(3, 256, 3), nn.ReLU(), nn.Conv2d(256, 256, 3), nn.ReLU()
        return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 1))

    worst = 0.0
    for layout in ("contiguous", "channels_last"):
        plan = Plan(layout=layout, fused=True)  # type: ignore[arg-type]
        options = {"tune": plan, "batch_size": 32, "steps": 24, "lr": 1e-3, "exact": False}
        with torch.backends.cudnn.flags(deterministic=True, benchmark=False):
            alone, _ = train(model(), images, **options)
            for step in (1, 7, 16):
                with tempfile.TemporaryDirectory() as folder:
                    train(model(), images, run=folder, checkpoint_every=1, **{**options, "steps": step})
                    more, _ = train(model(), images, run=folder, checkpoint_every=1, **options)
                assert more.resumed_from == step, (more.resumed_from, step)
                worst = max(worst, apart(alone.losses[step:], more.losses))
    return outcome(worst == 0.0, f"resumed at three steps in two layouts, losses differ by {worst:.1e}")


@check
def a_large_checkpoint_on_the_gpu() -> str:
    """Stall of steps by an asynchronous checkpoint of about 1.2 GB, against torch.save."""
    width = 4096

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(64, width), *(nn.Linear(width, width) for _ in range(6)), nn.Linear(width, 1)
        )

    moments: list[float] = []

    def noted(out: Tensor, target: Tensor) -> Tensor:
        torch.cuda.synchronize()
        moments.append(time.perf_counter())
        return mse(out, target)

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        options = {
            "checkpoint_every": 100,
            "steps": 400,
            "checkpoint_keep": 1,
            "loss": noted,
            "batch_size": 2048,
        }
        result, _ = train(model(), columns(), run=folder, **options)
        took = [after - before for before, after in pairwise(moments)]
        usual = statistics.median(took)
        saves = [sum(each - usual for each in took[first - 5 : first + 75]) for first in (100, 200, 300)]
        lost = statistics.median(saves)
        state = {f"p{n}": p.detach() for n, p in enumerate(model().cuda().parameters())}
        state |= {f"{name}{moment}": p.clone() for name, p in list(state.items()) for moment in "ab"}
        torch.cuda.synchronize()
        began = time.perf_counter()
        torch.save(state, Path(folder, "plain"))
        plain = time.perf_counter() - began
        size = sum(t.numel() * t.element_size() for t in state.values())
    first = sum(each - usual for each in took[3:90])
    every = ", ".join(f"{1e3 * each:.0f}" for each in saves)
    held = (
        f"steps of {1e3 * usual:.1f} ms held up by {every} ms in all ({1e3 * first:.0f} ms before the first)"
    )
    words = f"{size / GIB:.2f} GiB: {held}, torch.save {1e3 * plain:.0f} ms"
    return outcome(lost <= 0.1 * plain and math.isfinite(result.losses[-1]), words)


@check
def too_little_memory_in_the_middle() -> str:
    """A real CUDA out-of-memory: the same global batch in smaller micro-batches, and the same losses."""
    width, data = 1 << 14, columns(8192)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(64, width), nn.GELU(), nn.Linear(width, 256), nn.GELU(), nn.Linear(256, 1)
        )

    options = {"batch_size": 4096, "steps": 6}
    alone, _ = train(model(), data, **options)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.75 * GIB / torch.cuda.get_device_properties(0).total_memory)
    short, output = train(model(), data, **options)
    off = apart(alone.losses, short.losses)
    fine = "out of memory" in output and "micro-batches per global batch" in output and off < 1e-3
    return outcome(fine, f"losses differ by {off:.1e}; {output.strip()}")


@check
def too_little_memory_in_the_search() -> str:
    """The forked children of the search run out of memory, and the run continues with micro-batches."""
    width, data = 1 << 14, columns(8192)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, width), nn.GELU(), nn.Linear(width, 256), nn.GELU(), nn.Linear(256, 1)
    )
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = f"per_process_memory_fraction:{0.75 / 139:.5f}"
    result, output = train(
        model, data, batch_size=4096, steps=30, tune="auto", tune_seconds=20.0, compile=False
    )
    fine = "out of memory" in output and result.step == 30 and result.plan.micro_batches > 1
    return outcome(fine, output.strip())


@check
def a_profile_on_the_gpu() -> str:
    with tempfile.TemporaryDirectory() as folder:
        result, output = train(net(2048), columns(), profile=True, run=folder, steps=60, batch_size=1024)
        traces = [path.name for path in Path(folder).rglob("*trace*")]
    found = result.profile
    if found is None:
        return outcome(False, output)
    total = sum(found.shares.values())
    fine = 0.98 <= total <= 1.02 and bool(traces)
    return outcome(fine, f"{found.shares}, mfu {result.mfu}, {traces}\n{output.strip()}")


@check
def half_precision_goes_on() -> str:
    """fp16 scales its losses, and the scale is in the checkpoint, too."""
    alone, _ = train(net(), columns(), precision="fp16")
    with tempfile.TemporaryDirectory() as folder:
        train(net(), columns(), precision="fp16", run=folder, steps=20)
        more, _ = train(net(), columns(), precision="fp16", run=folder)
    off = apart(alone.losses[20:], more.losses)
    return outcome(off < 1e-6, f"losses differ by {off:.1e}")


@check
def a_compile_that_goes_on() -> str:
    """A compiled run resumes compiled, with bitwise equal losses."""
    options = {"tune": Plan(precision="bf16", compile="default", fused=True)}
    alone, _ = train(net(), columns(), **options)
    with tempfile.TemporaryDirectory() as folder:
        train(net(), columns(), run=folder, **{**options, "steps": 20})
        more, output = train(net(), columns(), run=folder, **options)
    off = apart(alone.losses[20:], more.losses)
    return outcome(off == 0.0, f"losses differ by {off:.1e} {output.strip()}")


@check
def from_cpu_to_gpu_and_back() -> str:
    """A checkpoint made on one device resumes on the other; without dropout, whose numbers depend on the device."""
    alone, _ = train(net(dropout=0.0), columns())
    offs = []
    for first, then in (("cpu", "cuda"), ("cuda", "cpu")):
        with tempfile.TemporaryDirectory() as folder:
            train(net(dropout=0.0), columns(), run=folder, steps=20, device=first)
            more, _ = train(net(dropout=0.0), columns(), run=folder, device=then)
        assert more.resumed_from == 20, more.resumed_from
        offs.append(apart(alone.losses[20:], more.losses))
    return outcome(max(offs) < 1e-3, f"losses differ by {offs[0]:.1e} and {offs[1]:.1e}")


@check
def a_loss_that_is_not_finite() -> str:
    """The run stops at the step, also in a graph, and keeps the checkpoint before it."""
    rows, target = columns()
    target = target.clone()
    target[::100] = float("inf")
    output = []
    for plan in (Plan(), Plan(graph=True)):
        with tempfile.TemporaryDirectory() as folder:
            try:
                train(net(), (rows, target), run=folder, tune=plan, batch_size=8)
            except Exception as failure:
                output.append(f"{type(failure).__name__}: {str(failure).splitlines()[0]}")
            else:
                return outcome(False, "went on")
    return outcome(len(output) == 2, " / ".join(output))


@check
def a_batch_prediction_on_the_gpu() -> str:
    """Rows of a Parquet file through a torch export on the GPU, in the process without keys; needs pyarrow."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from falaj.assembly.prediction.local_files import predict_files
    from falaj.records.control.predictions import PredictionRun
    from falaj.records.registry import FileFormat, TensorSpec

    count, names = 200_000, tuple(f"f{number}" for number in range(20))
    model = nn.Sequential(
        nn.Linear(20, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1)
    )
    rows, content = torch.randn(count, 20), io.BytesIO()
    dynamic = {"input": {0: torch.export.Dim("n", min=1, max=1 << 20)}}
    torch.export.save(torch.export.export(model.eval(), (rows[:64],), dynamic_shapes=dynamic), content)
    expected, rates = model(rows[:10_000]).detach(), {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        table = pa.table({each: rows[:, place].numpy() for place, each in enumerate(names)})
        pq.write_table(table, folder / "in.parquet", row_group_size=1 << 17)
        for device in ("gpu" if DEVICE == "cuda" else "auto", "cpu"):
            run = PredictionRun(
                model="check@1",
                file="model.pt2",
                sha256=hashlib.sha256(content.getvalue()).hexdigest(),
                format=FileFormat.TORCH_EXPORT,
                tensors=(TensorSpec(name="input", dtype="float32", shape=(-1, 20), features=names),),
                outputs=(TensorSpec(name="score", dtype="float32", shape=(-1, 1)),),
                source=str(folder / "in.parquet"),
                device=device,
            )
            done = predict_files(
                run, [content.getvalue()], folder / "out.parquet", overwrite=True, report=lambda _: None
            )
            found = torch.tensor(pq.read_table(folder / "out.parquet")[done.columns[-1]].to_numpy())
            worst = float((found[:10_000] - expected[:, 0]).abs().max())
            if len(found) != count or worst > 1e-2:
                return outcome(False, f"{device}: {len(found):,} rows, differ by {worst:.1e}")
            rates[device] = f"{device} {count / done.seconds:,.0f} rows/s, differs by {worst:.0e}"
    return outcome(True, f"{count:,} rows: " + ", ".join(rates.values()))


@check
def an_optimization_on_the_gpu() -> str:
    """A transformer encoder and its half-precision forms, measured and judged on the GPU; needs pyarrow."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "optimization"))
    import networks
    import pyarrow as pa
    import pyarrow.parquet as pq

    from falaj.optimization.budgets import parse_budget
    from falaj.optimization.runtime import job
    from falaj.optimization.settings import OptimizationSettings

    trained_on, judged_on = networks.token_rows(6000, seed=1), networks.token_rows(6000, seed=2)
    with tempfile.TemporaryDirectory() as name:
        inputs, outputs = Path(name, "in"), Path(name, "out")
        (inputs / "model").mkdir(parents=True)
        trained = networks.train(networks.NETWORKS["transformer"][0](), trained_on, epochs=3)
        networks.save_export(trained, trained_on, inputs / "model" / "model.pt2")
        flat = judged_on.features.reshape(len(judged_on.target), -1)
        lists = pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel()), flat.shape[1])
        pq.write_table(pa.table({"row": lists, "target": judged_on.target}), inputs / "data.parquet")
        settings = OptimizationSettings(
            target="target", features=("row",), recipes=("fp16", "bf16"), budget=parse_budget("auc -0.01")
        )
        found = job.optimize(settings, inputs=inputs, outputs=outputs, log=lambda _: None)
    lines = [f"{found.gpu or 'no GPU'}: original on the CPU {found.original.rows_per_s:,.0f} rows/s"]
    if found.on_gpu is not None:
        lines.append(f"on the GPU {found.on_gpu.rows_per_s:,.0f}")
    for each in found.variants:
        rate = "" if each.measured is None else f" {each.measured.rows_per_s:,.0f} rows/s"
        lines.append(f"{each.recipe}{rate}, {each.verdict}: {each.reason}")
    is_measured = found.on_gpu is not None and all(each.measured for each in found.variants)
    return outcome(is_measured, "; ".join(lines))


@check
def groups_over_nccl() -> str:
    """One process that forms its own group; and more processes than GPUs, which are refused with a fix."""
    script = (
        "import torch, sys\n"
        "from falaj.training.runtime.fit import fit\n"
        "rows = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))\n"
        "torch.manual_seed(0)\n"
        "data = rows, rows[:, :1]\n"
        "model, loss = torch.nn.Linear(8, 1), torch.nn.functional.mse_loss\n"
        "print('loss', fit(model, loss, data, steps=8, tune='off', parallel=sys.argv[1]).losses[-1])\n"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    too_many, found, fine = torch.cuda.device_count() + 1, [], True
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.py")
        path.write_text(script)
        for way, count in (("ddp", 1), ("fsdp", 1), ("ddp", too_many)):
            command = [*launch, str(count), str(path), way]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
            refused = "there are more processes than GPUs" in done.stderr
            fine = fine and (refused if count == too_many else done.returncode == 0)
            words = "refused" if refused else done.stdout.strip()
            found.append(f"{way} over {count}: exit {done.returncode}, {words}")
    return outcome(fine, "; ".join(found))


if __name__ == "__main__":
    main()
