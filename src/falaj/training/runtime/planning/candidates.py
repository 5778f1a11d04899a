"""Candidate plans and their order: cheap and promising changes first, each on top of the best plan so far.

How fast a precision or a fused update is shows only where kernels take the time. A short step without compilation takes
the time of its launches, whatever the precision; so what was slower there is tried again as a CUDA graph and compiled.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from falaj.training.runtime.planning.plan import Plan
from falaj.training.runtime.planning.trials import TrialOutcome

CandidateGenerator: TypeAlias = Generator[Plan, TrialOutcome, None]

CLEAR_GAIN = 1.5
"""With a speed-up of at least this factor no other precision is tried, nor again what is slower by it."""
SPEED_ORDER = ("bf16", "fp16", "tf32", "fp32")
HALF_PRECISIONS = ("bf16", "fp16")
LAUNCH_BOUND_S = 0.015
"""Longer steps are rarely launch-bound, so that a CUDA graph does not help. To try one takes a second."""
AUTOTUNE_S = 0.005
"""Shorter steps are not autotuned: they have no large kernels."""
MIN_EPOCH_STEPS = 64
"""A larger global batch must leave at least so many steps per epoch."""


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The options that are open on this machine for this model."""

    on_gpu: bool
    start: Plan
    fixed: Mapping[str, Any]
    """The fields of the plan that the caller has set."""
    batch_size: int
    chooses_batch: bool = False
    samples: int = 1
    images: bool = False
    fusible: bool = True
    half_precision: str | None = None
    """The 16-bit precision that this hardware computes fast in, if there is one."""
    compiles: bool = True
    risky: bool = True
    """Whether candidates may crash: only if they run in a child process."""
    copies_batches: bool = False
    """Whether each batch is copied to the GPU, instead of being there already."""
    threads: int = 1
    margin: float = 1.02
    """The speed-up that a candidate needs; less is noise."""


@dataclass
class Incumbent:
    """The best plan so far."""

    space: SearchSpace
    best: TrialOutcome | None = None
    plain: TrialOutcome | None = None
    tried: set[Plan] = field(default_factory=set)
    passed: list[TrialOutcome] = field(default_factory=list)
    """The candidates that computed the same as fp32, whether or not they were faster."""

    @property
    def plan(self) -> Plan:
        return self.best.plan if self.best else self.space.start

    @property
    def gain(self) -> float:
        if self.best is None or self.plain is None or not self.plain.samples_per_second:
            return 1.0
        return self.best.samples_per_second / self.plain.samples_per_second

    @property
    def step_seconds(self) -> float:
        size = self.plan.batch_size or self.space.batch_size
        return size / self.best.samples_per_second if self.best else 0.0

    def attempt(self, plan: Plan) -> Generator[Plan, TrialOutcome, TrialOutcome | None]:
        """Try `plan`, unless the caller has fixed another value or it was tried before."""
        wanted = plan.facts()
        if plan in self.tried or any(wanted[name] != value for name, value in self.space.fixed.items()):
            return None
        self.tried.add(plan)
        outcome = yield plan
        if outcome.rejection is None:
            self.passed.append(outcome)
            if self.beats(outcome):
                self.best = outcome
        return outcome

    def change(self, **changes: Any) -> Generator[Plan, TrialOutcome, TrialOutcome | None]:
        return (yield from self.attempt(replace(self.plan, **changes)))

    def beats(self, outcome: TrialOutcome) -> bool:
        needed = self.best.samples_per_second * self.space.margin if self.best else 0.0
        return outcome.samples_per_second > needed

    def rivals(self, **easy: Any) -> list[Plan]:
        """Return the best plan in each other precision, and with the `easy` changes, that is not clearly slower.

        The 16-bit precision is first. fp32 is left out where TF32 passed: it is never faster.
        """
        if self.best is None:
            return []
        least = self.best.samples_per_second / CLEAR_GAIN
        close = {each.plan.precision for each in self.passed if each.samples_per_second >= least}
        if "tf32" in close and self.plan.precision != "fp32":
            close.discard("fp32")
        order = sorted(close, key=lambda precision: SPEED_ORDER.index(precision))
        plans = [replace(self.plan, precision=precision, **easy) for precision in order]
        return [plan for plan in plans if plan != self.plan]


def generate_candidates(space: SearchSpace) -> CandidateGenerator:
    """Yield candidates one after the other; the outcome of each is sent back, and determines the next."""
    incumbent = Incumbent(space)
    incumbent.plain = yield from incumbent.attempt(space.start)
    yield from _fit_into_memory(incumbent)
    if (
        incumbent.plain is not None
        and incumbent.plain.rejection
        and "memory" not in incumbent.plain.rejection
    ):
        return  # every other candidate would fail in the same way
    yield from (_on_gpu(incumbent) if space.on_gpu else _on_cpu(incumbent))


def _fit_into_memory(incumbent: Incumbent) -> CandidateGenerator:
    pieces = 2
    while (
        incumbent.best is None
        and incumbent.plain is not None
        and "memory" in (incumbent.plain.rejection or "")
    ):
        if pieces > incumbent.space.batch_size:
            return
        incumbent.plain = yield from incumbent.attempt(replace(incumbent.space.start, micro_batches=pieces))
        pieces *= 2


def _on_gpu(incumbent: Incumbent) -> CandidateGenerator:
    space = incumbent.space
    layout = "channels_last" if space.images else "contiguous"
    easy: dict[str, Any] = {"fused": space.fusible, "layout": layout}
    if space.half_precision:
        found = yield from incumbent.change(precision=space.half_precision, **easy)
        if (
            incumbent.gain < CLEAR_GAIN
            and space.chooses_batch
            and found is not None
            and found.rejection is None
        ):
            yield from _larger_batch(incumbent, found.plan, factor=4)  # a small one may leave a GPU idle
    if incumbent.gain < (2 * CLEAR_GAIN if incumbent.plan.batch_size else CLEAR_GAIN):
        yield from incumbent.change(precision="tf32", **easy)
        yield from incumbent.change(**easy)
    if incumbent.step_seconds < LAUNCH_BOUND_S:
        yield from _as_graph(incumbent, easy)
    if space.copies_batches:
        yield from incumbent.change(pinned=False)
    if space.chooses_batch:
        yield from _larger_batches(incumbent)
    if not space.compiles:
        return
    yield from _compiled(incumbent, easy)
    if incumbent.plan.compile == "off":
        return
    if not incumbent.plan.graph and incumbent.step_seconds < LAUNCH_BOUND_S:
        yield from incumbent.change(graph=True)  # compiling may have removed what cannot be captured
    if space.chooses_batch:
        yield from _larger_batches(incumbent, most=1)
    if space.risky and incumbent.step_seconds >= AUTOTUNE_S:
        yield from incumbent.change(compile="max-autotune-no-cudagraphs")


def _on_cpu(incumbent: Incumbent) -> CandidateGenerator:
    space = incumbent.space
    if space.threads > 1:
        yield from incumbent.change(threads=1)
    yield from incumbent.change(fused=space.fusible)
    if space.images:
        yield from incumbent.change(layout="channels_last")
    if space.half_precision:
        yield from incumbent.change(precision=space.half_precision)
    if space.chooses_batch:
        yield from _larger_batches(incumbent)
    if space.compiles:
        yield from _compiled(incumbent, {})


def _as_graph(incumbent: Incumbent, easy: Mapping[str, Any]) -> CandidateGenerator:
    """Try a CUDA graph, and if it is faster, the other precisions as one: now their kernels take the time."""
    rivals = incumbent.rivals(**easy)
    yield from incumbent.change(graph=True)
    if incumbent.plan.graph:
        for rival in rivals:
            yield from incumbent.attempt(replace(rival, graph=True))


def _compiled(incumbent: Incumbent, easy: Mapping[str, Any]) -> CandidateGenerator:
    """Try the best plan compiled; then its rivals, if compiling pays.

    A rival in 16 bits is tried in any case: without compilation it pays for casts that a compiler merges into kernels.
    """
    rivals = incumbent.rivals(**easy)
    compiled = yield from incumbent.change(compile="default")
    if compiled is not None and compiled.rejection is not None:
        if not incumbent.plan.graph:
            return  # the model cannot be compiled, or there is no time for it
        compiled = yield from incumbent.change(compile="default", graph=False)
        if compiled is None or compiled.rejection is not None:
            return
        rivals = [replace(rival, graph=False) for rival in rivals]
    for rival in rivals:
        if incumbent.plan.compile != "off" or rival.precision in HALF_PRECISIONS:
            yield from incumbent.attempt(replace(rival, compile="default"))


def _larger_batches(incumbent: Incumbent, *, most: int = 10) -> CandidateGenerator:
    """Multiply the global batch by four while that is faster, and then by two."""
    factor = 4
    for _ in range(most):
        now = incumbent.plan.batch_size or incumbent.space.batch_size
        yield from _larger_batch(incumbent, incumbent.plan, factor=factor)
        if incumbent.plan.batch_size != factor * now:
            if factor == 2:
                return
            factor = 2


def _larger_batch(incumbent: Incumbent, plan: Plan, *, factor: int) -> CandidateGenerator:
    """Try `plan` with a larger global batch, if an epoch keeps enough steps."""
    size = factor * (plan.batch_size or incumbent.space.batch_size)
    if size * MIN_EPOCH_STEPS <= incumbent.space.samples:
        yield from incumbent.attempt(replace(plan, batch_size=size))
