"""Finds what the memory of a step is made of, and puts it together for any number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from falaj.training.runtime.data import Columns, Source
from falaj.training.runtime.errors import InvalidTraining, NoEstimate
from falaj.training.runtime.memory.choices import choices
from falaj.training.runtime.memory.estimates import Estimate, Way
from falaj.training.runtime.memory.kept import keep_parts, load_parts, parts_key
from falaj.training.runtime.memory.layouts import Parts, peak_bytes, samples_at_once
from falaj.training.runtime.memory.trace import Trace
from falaj.training.runtime.optimizers import OptimizerChoice
from falaj.training.runtime.plan.plans import Plan, Precision
from falaj.training.runtime.spread.layout import Layout, Parallel, lay_out
from falaj.training.runtime.spread.tensor_plan import TensorPlan, find_cuts
from falaj.training.runtime.steps import Loss


class Estimator:
    """Finds the parts of a step once for each precision, and puts them together for any layout."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        source: Source,
        optimizer: OptimizerChoice,
        plan: Plan,
        batch_size: int,
        *,
        device: str,
        tensor_plan: TensorPlan | None = None,
        exact: bool = False,
        fixed_pieces: bool = False,
    ) -> None:
        self._model: nn.Module = getattr(model, "_orig_mod", model)  # as it was before torch.compile
        self._loss, self._source, self._optimizer = loss, source, optimizer
        self.plan, self.batch_size, self.device = plan, batch_size, device
        self._tensor_plan, self._exact, self._fixed_pieces = tensor_plan, exact, fixed_pieces
        self._known: dict[Precision, Parts] = {}
        self._usual: int | None = None

    @property
    def data_bytes(self) -> int:
        """What the data takes if it lies on a GPU."""
        known = self.device == "cuda" and isinstance(self._source, Columns)
        return self._source.size_bytes if known and isinstance(self._source, Columns) else 0

    def estimate(self, parallel: Parallel, processes: int) -> Estimate:
        ways = tuple(self.ways(parallel, processes))
        parts = self.parts(self.plan.precision, lay_out(parallel, processes))
        trace = parts.traces[0]
        return Estimate(
            device=self.device,
            batch_size=self.batch_size,
            parameters_bytes=trace.parameters,
            gradients_bytes=trace.trained,
            state_bytes=trace.state,
            activations_bytes=trace.activations,
            data_bytes=self.data_bytes,
            method=parts.method,
            ways=ways,
        )

    def ways(self, parallel: Parallel, processes: int) -> Iterator[Way]:
        """As asked, then as `auto` may choose, then nearer and farther changes, each once."""
        seen: set[tuple[object, ...]] = set()
        for choice in choices(self, parallel, processes):
            key = (choice.processes, choice.layout.words, choice.precision, choice.micro_batches)
            if key not in seen:
                seen.add(key)
                yield Way(
                    processes=choice.processes,
                    layout=choice.layout.words,
                    precision=choice.precision,
                    micro_batches=choice.micro_batches,
                    peak_bytes=self.peak(choice.layout, choice.micro_batches, choice.precision),
                    as_asked=choice.as_asked,
                )

    def peak(self, layout: Layout, micro_batches: int, precision: Precision | None = None) -> int:
        """The most that a process takes."""
        parts = self.parts(precision or self.plan.precision, layout)
        return peak_bytes(
            parts, layout, batch_size=self.batch_size, micro_batches=micro_batches, exact=self._exact
        )

    def splits(self, parallel: Parallel, processes: int) -> bool:
        """As `auto` does for several processes, and a GPU's single one when it has run out of memory."""
        if processes == 1:
            return self.device == "cuda" and not self._exact
        return parallel == "auto" and not self._exact and not self._fixed_pieces

    def can_cut(self, size: int) -> bool:
        """Whether layers can be cut in `size` for tensor parallelism."""
        try:
            return size > 1 and bool(find_cuts(self._model, self._tensor_plan, size=size))
        except InvalidTraining:
            return False

    def parts(self, precision: Precision, layout: Layout) -> Parts:
        """What a step is made of; followed for as many samples as a process of the first `layout` has at once."""
        if self._usual is None:
            self._usual = samples_at_once(self.batch_size, layout, self.plan.micro_batches)
        if precision not in self._known:
            self._known[precision] = self._find(replace(self.plan, precision=precision), self._usual)
        return self._known[precision]

    def _find(self, plan: Plan, usual: int) -> Parts:
        from falaj.training.runtime.memory.tracing import quiet

        with quiet():
            return self._look_up(plan, usual)

    def _look_up(self, plan: Plan, usual: int) -> Parts:
        sample = self._source.read(torch.zeros(1, dtype=torch.int64), seed=0)
        options = {
            "samples": usual,
            "device": self.device,
            **{name: getattr(plan, name) for name in ("precision", "layout", "fused")},
            "tensor_plan": sorted((self._tensor_plan or {}).items()),
        }
        key = parts_key(self._model, self._loss, self._optimizer, sample, options)
        if key is not None and (kept := load_parts(key)) is not None:
            return kept
        traces, method = self._traces(plan, sample, usual)
        largest, outside = block_bytes(self._model)
        parts = Parts(
            traces=traces, largest_block=largest, outside_blocks=outside, cut=self._cut_bytes(), method=method
        )
        if key is not None:
            keep_parts(key, parts)
        return parts

    def _traces(self, plan: Plan, sample: Any, usual: int) -> tuple[tuple[Trace, ...], str]:
        """For the usual number of samples and for half of them; for few real ones, where it cannot be faked."""
        from falaj.training.runtime.memory.sampling import trace_samples
        from falaj.training.runtime.memory.tracing import trace_step

        given = (self._model, self._loss, self._optimizer)

        def fake(count: int) -> Trace:
            return trace_step(*given, sample, samples=count, plan=plan, device=self.device)

        def real(count: int) -> Trace:
            batch = self._source.read(torch.arange(count), seed=0)
            return trace_samples(*given, batch, samples=count, plan=plan, device=self.device)

        try:
            return _one_or_two(fake, usual), "traced"
        except Exception as failure:  # it is the user's model: what cannot be faked is tried
            reason = failure
        try:
            return _one_or_two(real, min(2, len(self._source))), "sampled"
        except Exception as failure:
            raise NoEstimate(
                f"the memory of this model cannot be estimated: on fake tensors {_short(reason)}; "
                f"on samples {_short(failure)}"
            ) from failure

    def _cut_bytes(self) -> int:
        try:
            cuts = find_cuts(self._model, self._tensor_plan, size=1)
        except InvalidTraining:
            return 0
        layers = [self._model.get_submodule(name) for name in cuts]
        return sum(p.nbytes for layer in layers for p in layer.parameters())


def _one_or_two(trace: Callable[[int], Trace], usual: int) -> tuple[Trace, ...]:
    """For `usual` samples, and for half of them where that works: batch normalization refuses a single one."""
    first = trace(usual)
    if usual < 2:
        return (first,)
    try:
        return first, trace(usual // 2)
    except Exception:  # the model may refuse few samples
        return (first,)


def block_bytes(model: nn.Module) -> tuple[int, int]:
    """The largest block that fsdp gathers by itself, and what is in no block."""
    from falaj.training.runtime.spread.ways import blocks

    left = {id(p): p.nbytes for p in model.parameters()}
    sizes = [
        sum(left.pop(id(p), 0) for p in block.parameters()) for block in blocks(model)
    ]  # the innermost first: each parameter is gathered with the smallest block around it
    return max(sizes, default=0), sum(left.values())


def _short(failure: BaseException) -> str:
    return (str(failure).strip().split("\n")[0] or type(failure).__name__)[:200]
