"""The bottleneck of a training step: what bounds it, where its time goes, and which option to change."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from falaj.training.runtime.planning.plan import Plan
from falaj.training.runtime.profiling.breakdown import PARTS, Overlap, Part, TimeBreakdown
from falaj.training.runtime.profiling.cost import StepCost
from falaj.training.runtime.profiling.peaks import DevicePeaks

Bound = Literal["input", "launch", "communication", "memory", "compute"]

MIN_SHOWN_SHARE = 0.005
MIN_WAIT_SHARE = 0.25
"""A step that waits for a smaller share of its time is bound by computing."""

LABELS: dict[Part, str] = {
    "input": "waiting for data",
    "copy": "copies to the device",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "compute": "computing",
    "communication": "communication",
    "launch": "launching",
    "python": "between steps",
}


@dataclass(frozen=True)
class RunConditions:
    """The options of a run that advice depends on."""

    plan: Plan
    processes: int = 1
    layout: str = ""


@dataclass(frozen=True)
class Utilization:
    """The share of the device's peaks that a step reaches while it computes; None: unknown."""

    flops: float | None = None
    bandwidth: float | None = None


@dataclass(frozen=True)
class BottleneckReport:
    """The result of a profile. `shares` of the step's time add up to 1; `advice` names options of `fit`."""

    bound: Bound
    sentence: str
    shares: dict[str, float]
    steps: int
    step_seconds: float
    advice: tuple[str, ...]
    use: Utilization = Utilization()
    overlap: dict[str, Overlap] = field(default_factory=dict)
    """data, copies, communication, checkpoints: their seconds, and those that overlapped with computing."""
    trace: str | None = None
    """The trace file, for chrome://tracing, Perfetto, or TensorBoard's profiler."""

    @property
    def summary(self) -> str:
        """The report for people, in a few lines."""
        shown = sorted(self.shares.items(), key=lambda each: -each[1])
        shares = ", ".join(f"{LABELS[name]} {share:.0%}" for name, share in shown if share >= MIN_SHOWN_SHARE)  # type: ignore[index]
        lines = [self.sentence, f"  a step   {self.step_seconds * 1e3:.3g} ms: {shares}"]
        hidden = [
            f"{name} {each.hidden:.3g} of {each.took:.3g} s"
            for name, each in self.overlap.items()
            if each.took >= MIN_SHOWN_SHARE * self.steps * self.step_seconds
        ]
        lines += [f"  overlap  {', '.join(hidden)} beside computing"] if hidden else []
        lines += [f"  try      {each}" for each in self.advice]
        lines += [f"  trace    {self.trace}"] if self.trace else []
        return "\n".join(lines)


def diagnose(
    shares: TimeBreakdown,
    conditions: RunConditions,
    *,
    cost: StepCost | None,
    peaks: DevicePeaks | None,
    overlap: dict[str, Overlap] | None = None,
    trace: str | None = None,
) -> BottleneckReport:
    """Return the report on steps with this breakdown, `cost` and device `peaks`."""
    use = utilization(shares, cost, peaks)
    bound = find_bound(shares, use)
    advice = advise(bound, shares, conditions)
    beside = {"copies": shares.copies, "communication": shares.communication, **(overlap or {})}
    return BottleneckReport(
        bound,
        f"{bound}-bound: {_why(bound, shares, use)}" + (f"; {advice[0]}" if advice else ""),
        {part: shares.of[part] for part in PARTS},
        shares.steps,
        shares.step_s,
        tuple(advice[1:]),
        use,
        {name: each for name, each in beside.items() if each.took},
        trace,
    )


def utilization(shares: TimeBreakdown, cost: StepCost | None, peaks: DevicePeaks | None) -> Utilization:
    """Return the utilization while the device computed."""
    busy_s = shares.computing * shares.step_s
    if cost is None or peaks is None or not busy_s:
        return Utilization()
    moved = None if not peaks.bandwidth else cost.bytes / busy_s / peaks.bandwidth
    return Utilization(cost.flops / busy_s / peaks.flops, moved)


def find_bound(shares: TimeBreakdown, use: Utilization) -> Bound:
    """Return what a step waits for most; if that is little, the nearer limit of the roofline."""
    of = shares.of
    waits: dict[Bound, float] = {
        "input": of["input"] + of["copy"],
        "communication": of["communication"],
        "launch": of["launch"] + of["python"],
    }
    most = max(waits, key=lambda bound: waits[bound])
    if waits[most] >= MIN_WAIT_SHARE:
        return most
    if use.flops is None or use.bandwidth is None:
        return "compute"
    return "compute" if use.flops >= use.bandwidth else "memory"


def _why(bound: Bound, shares: TimeBreakdown, use: Utilization) -> str:
    of = shares.of
    if bound == "input" and of["copy"] > of["input"]:
        return f"{of['copy']:.0%} of a step waits for copies to the device"
    if bound == "input":
        return f"{of['input']:.0%} of a step waits for data"
    if bound == "communication":
        hidden = f"{shares.communication.share:.0%} of the communication is hidden"
        return f"{of['communication']:.0%} of a step waits for other processes ({hidden})"
    if bound == "launch":
        who = "the GPU waits for the next kernel" if shares.on_gpu else "is spent between operations"
        return f"{of['launch'] + of['python']:.0%} of a step {who}"
    if use.flops is None or use.bandwidth is None:
        return f"{shares.computing:.0%} of a step computes"
    if bound == "memory":
        moved = f"at up to {use.bandwidth:.0%} of the memory's peak and {use.flops:.0%} of the FLOP/s"
        return f"{shares.computing:.0%} of a step computes, {moved}"
    return f"{shares.computing:.0%} of a step computes, at {use.flops:.0%} of the peak FLOP/s"


def advise(bound: Bound, shares: TimeBreakdown, conditions: RunConditions) -> list[str]:
    """Return options that would help and are not set, the most promising first."""
    plan, found = conditions.plan, list[str]()
    slow = plan.precision in ("fp32", "tf32")
    if bound == "input":
        workers = plan.workers or 0
        if shares.of["copy"] > shares.of["input"]:
            found.append("prefetch=4 copies ahead, and data given as tensors may lie on the device")
        else:
            found.append(f"workers={max(4, 2 * workers)} reads ahead beside the steps")
            found.append("a dataset with __getitems__ reads a batch at once; tensors are quicker still")
    elif bound == "launch":
        features = "compile and CUDA graphs" if shares.on_gpu else "compile"
        found += [f'tune="auto" tries {features}'] * (plan.compile == "off" and not plan.graph)
        found.append("a larger batch_size gives each operation more to do")
    elif bound == "communication":
        found.append("a larger batch_size computes longer for the same communication")
        if "pipeline" in conditions.layout:
            found.append(f"accumulate={2 * plan.micro_batches} keeps the stages of a pipeline busier")
        elif plan.micro_batches > 1:
            found.append("accumulate=1 communicates once a step")
        if "fsdp" in conditions.layout or "tensor" in conditions.layout:
            found.append('parallel="ddp" communicates less, where the model fits into each process')
    elif bound == "memory":
        found += ["compile=True joins operations, so that less goes through memory"] * (plan.compile == "off")
        found += ['precision="bf16" halves what is moved'] * slow
    else:
        found += ['precision="bf16" is quicker where the hardware has it; tune="auto" checks it'] * slow
        found += ["more processes with parallel= share the work"] * (conditions.processes == 1 and not slow)
    return found
