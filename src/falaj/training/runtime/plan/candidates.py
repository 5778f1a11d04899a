"""Which plans are tried, in which order: what is cheap and likely first, each change on top of the best so far."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from falaj.training.runtime.plan.plans import Plan
from falaj.training.runtime.plan.trials import Outcome

Walk: TypeAlias = Generator[Plan, Outcome, None]

CLEARLY = 1.5
"""A precision that is so much faster leaves no doubt about the next."""
LAUNCH_BOUND_S = 0.005
"""Longer steps keep a GPU busy without a graph."""
BATCHES_OF_AN_EPOCH = 64
"""An epoch is left with at least so many steps when the global batch is chosen here."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """What there is to choose from, on this machine and for this model."""

    on_gpu: bool
    start: Plan
    fixed: Mapping[str, Any]
    """What the caller has decided, by the plan's names."""
    batch_size: int
    chooses_batch: bool = False
    samples: int = 1
    images: bool = False
    fusible: bool = True
    fast_16: str | None = None
    """The 16-bit precision that this hardware is fast in, if there is one."""
    compiles: bool = True
    risky: bool = True
    """Whether a candidate may crash: only where that costs no more than a child process."""
    sends: bool = False
    """Whether each batch is sent to the GPU, and is not there already."""
    threads: int = 1
    margin: float = 1.02
    """How much faster a candidate must be: less is noise."""


@dataclass
class Leader:
    """The best plan so far."""

    space: Space
    best: Outcome | None = None
    plain: Outcome | None = None
    tried: set[Plan] = field(default_factory=set)

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

    def attempt(self, plan: Plan) -> Generator[Plan, Outcome, Outcome | None]:
        """Try `plan`, unless the caller has decided otherwise or it was tried."""
        wanted = plan.facts()
        if plan in self.tried or any(wanted[name] != value for name, value in self.space.fixed.items()):
            return None
        self.tried.add(plan)
        outcome = yield plan
        if outcome.why_not is None and self.beats(outcome):
            self.best = outcome
        return outcome

    def change(self, **changes: Any) -> Generator[Plan, Outcome, Outcome | None]:
        return (yield from self.attempt(replace(self.plan, **changes)))

    def beats(self, outcome: Outcome) -> bool:
        needed = self.best.samples_per_second * self.space.margin if self.best else 0.0
        return outcome.samples_per_second > needed


def walk(space: Space) -> Walk:
    """The candidates, one after the other; each one's outcome is sent in, and decides on the next."""
    leader = Leader(space)
    leader.plain = yield from leader.attempt(space.start)
    yield from _until_it_fits(leader)
    if leader.plain is not None and leader.plain.why_not and "memory" not in leader.plain.why_not:
        return  # what fails here, fails in all of them
    yield from (_on_gpu(leader) if space.on_gpu else _on_cpu(leader))


def _until_it_fits(leader: Leader) -> Walk:
    pieces = 2
    while leader.best is None and leader.plain is not None and "memory" in (leader.plain.why_not or ""):
        if pieces > leader.space.batch_size:
            return
        leader.plain = yield from leader.attempt(replace(leader.space.start, micro_batches=pieces))
        pieces *= 2


def _on_gpu(leader: Leader) -> Walk:
    space = leader.space
    layout = "channels_last" if space.images else "contiguous"
    easy: dict[str, Any] = {"fused": space.fusible, "layout": layout}
    if space.fast_16:
        found = yield from leader.change(precision=space.fast_16, **easy)
        if leader.gain < CLEARLY and space.chooses_batch and found is not None and found.why_not is None:
            yield from _larger_batch(leader, found.plan, factor=4)  # a small one may leave a GPU idle
    if leader.gain < (2 * CLEARLY if leader.plan.batch_size else CLEARLY):
        yield from leader.change(precision="tf32", **easy)
        yield from leader.change(**easy)
    if leader.step_seconds < LAUNCH_BOUND_S:
        yield from leader.change(graph=True)
        if leader.plan.graph:
            yield from leader.change(precision="tf32")
    if space.sends:
        yield from leader.change(pinned=False)
    if space.chooses_batch:
        yield from _larger_batches(leader)
    if not space.compiles:
        return
    compiled = yield from leader.change(compile="default")
    if compiled is not None and compiled.why_not is not None and leader.plan.graph:
        yield from leader.change(compile="default", graph=False)
    if space.chooses_batch and leader.plan.compile != "off":
        yield from _larger_batches(leader, most=1)
    if space.risky and leader.step_seconds >= LAUNCH_BOUND_S:
        yield from leader.change(compile="max-autotune-no-cudagraphs")


def _on_cpu(leader: Leader) -> Walk:
    space = leader.space
    if space.threads > 1:
        yield from leader.change(threads=1)
    yield from leader.change(fused=space.fusible)
    if space.images:
        yield from leader.change(layout="channels_last")
    if space.fast_16:
        yield from leader.change(precision=space.fast_16)
    if space.chooses_batch:
        yield from _larger_batches(leader)
    if space.compiles:
        yield from leader.change(compile="default")


def _larger_batches(leader: Leader, *, most: int = 10) -> Walk:
    """Enlarge the global batch fourfold while that is faster, and then twofold."""
    factor = 4
    for _ in range(most):
        now = leader.plan.batch_size or leader.space.batch_size
        yield from _larger_batch(leader, leader.plan, factor=factor)
        if leader.plan.batch_size != factor * now:
            if factor == 2:
                return
            factor = 2


def _larger_batch(leader: Leader, plan: Plan, *, factor: int) -> Walk:
    """`plan` with a larger global batch, if an epoch still has enough steps."""
    size = factor * (plan.batch_size or leader.space.batch_size)
    if size * BATCHES_OF_AN_EPOCH <= leader.space.samples:
        yield from leader.attempt(replace(plan, batch_size=size))
