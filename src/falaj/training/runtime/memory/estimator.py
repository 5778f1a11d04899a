"""Memory estimates: traces one training step and derives the peak of a process for any parallel layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn, optim

from falaj.training.runtime.data.sources import SampleSource, TensorSource
from falaj.training.runtime.errors import InvalidTraining, NoEstimate
from falaj.training.runtime.memory.cache import (
    load_pipeline_memory,
    load_step_memory,
    memory_key,
    store_pipeline_memory,
    store_step_memory,
)
from falaj.training.runtime.memory.configurations import TrainingConfiguration, configurations
from falaj.training.runtime.memory.peak_memory import (
    even_pipeline_peak,
    peak_bytes,
    pipeline_peak,
    samples_per_micro_batch,
)
from falaj.training.runtime.memory.sizes import format_bytes
from falaj.training.runtime.memory.step_memory import PipelineMemory, StepMemory, StepTrace
from falaj.training.runtime.parallel.fsdp_blocks import block_bytes, can_be_sharded
from falaj.training.runtime.parallel.layout import Parallel, ParallelLayout, parallel_layout
from falaj.training.runtime.parallel.tensor_plan import Cut, TensorPlan, find_cuts
from falaj.training.runtime.planning.plan import Plan, Precision
from falaj.training.runtime.step.calling import Loss
from falaj.training.runtime.step.optimizers import OptimizerChoice


@dataclass(frozen=True, kw_only=True)
class ConfigurationEstimate:
    """One training configuration and the peak memory of each of its processes."""

    processes: int
    layout: str
    precision: Precision
    micro_batches: int
    peak_bytes: int
    as_asked: bool
    """Whether the training uses this configuration without changes: as requested, or as parallel="auto" may
    choose."""

    @property
    def summary(self) -> str:
        parts = [self.layout, self.precision]
        parts += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        return f"{', '.join(parts)} ({format_bytes(self.peak_bytes)} a process)"


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """The memory that a training takes on a `device`, cuda or cpu. The first of `ways` is the request itself."""

    device: str
    batch_size: int
    parameters_bytes: int
    gradients_bytes: int
    state_bytes: int
    activations_bytes: int
    data_bytes: int
    """The size of the whole dataset, which is kept on a GPU if it takes at most a quarter of it."""
    method: str
    """traced: on fake tensors; sampled: computed on a few samples, because the model cannot be traced."""
    ways: tuple[ConfigurationEstimate, ...] = field(repr=False)

    @property
    def peak_bytes(self) -> int:
        """The peak memory of one process in the requested configuration."""
        return self.ways[0].peak_bytes

    def fitting(self, memory_bytes: int) -> Iterator[ConfigurationEstimate]:
        """Yield the configurations that fit into `memory_bytes`, closest to the request first."""
        return (way for way in self.ways if way.peak_bytes <= memory_bytes)

    def facts(self) -> dict[str, Any]:
        return asdict(self)


class MemoryEstimator:
    """Traces a step once per precision, and derives the peak memory for any layout from it."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        source: SampleSource,
        optimizer: OptimizerChoice,
        plan: Plan,
        batch_size: int,
        *,
        device: str,
        tensor_plan: TensorPlan | None = None,
        pipeline_cuts: Sequence[str] | None = None,
        exact: bool = False,
        fixed_micro_batches: bool = False,
    ) -> None:
        """`fixed_micro_batches`: whether the caller has set the number of micro-batches."""
        self._model: nn.Module = getattr(model, "_orig_mod", model)  # the model without torch.compile
        self._loss, self._source, self._optimizer = loss, source, optimizer
        self.plan, self.batch_size, self.device = plan, batch_size, device
        self._tensor_plan, self._exact, self._fixed_micro_batches = tensor_plan, exact, fixed_micro_batches
        self._pipeline_cuts = pipeline_cuts
        self._known: dict[Precision, StepMemory] = {}
        self._known_stages: dict[int, PipelineMemory | None] = {}
        self._unknown: set[Precision] = set()
        self._usual: int | None = None

    @property
    def data_bytes(self) -> int:
        """The size of the dataset if it is kept on a GPU, else 0."""
        known = self.device == "cuda" and isinstance(self._source, TensorSource)
        return self._source.size_bytes if known and isinstance(self._source, TensorSource) else 0

    def estimate(self, parallel: Parallel, processes: int) -> MemoryEstimate:
        """Return the estimate. Raise InvalidTraining if the model cannot be split or staged as `parallel`
        requires."""
        requested = parallel_layout(parallel, processes)
        if requested.tensor > 1:
            find_cuts(self._model, self._tensor_plan, size=requested.tensor)
        ways = tuple(self.configurations(parallel, processes))
        parts = self.step_memory(self.plan.precision, requested)
        samples = samples_per_micro_batch(self.batch_size, requested, self.default_micro_batches(requested))
        trace = parts.traces[0]
        return MemoryEstimate(
            device=self.device,
            batch_size=self.batch_size,
            parameters_bytes=trace.parameters,
            gradients_bytes=trace.trained,
            state_bytes=trace.state,
            activations_bytes=parts.activations(samples),
            data_bytes=self.data_bytes,
            method=parts.method,
            ways=ways,
        )

    def configurations(self, parallel: Parallel, processes: int) -> Iterator[ConfigurationEstimate]:
        """Yield the estimate of each configuration once: the request, what `auto` may choose, then other changes."""
        seen: set[tuple[object, ...]] = set()
        for choice in configurations(self, parallel, processes):
            key = (choice.processes, choice.layout.summary, choice.precision, choice.micro_batches)
            if key not in seen and (choice.precision not in self._unknown or not seen):
                seen.add(key)
                try:
                    yield self._way(choice)
                except NoEstimate:  # the model does not support this other precision
                    if len(seen) == 1:
                        raise
                    self._unknown.add(choice.precision)

    def _way(self, choice: TrainingConfiguration) -> ConfigurationEstimate:
        return ConfigurationEstimate(
            processes=choice.processes,
            layout=choice.layout.summary,
            precision=choice.precision,
            micro_batches=choice.micro_batches,
            peak_bytes=self.peak(choice.layout, choice.micro_batches, choice.precision),
            as_asked=choice.as_asked,
        )

    def peak(self, layout: ParallelLayout, micro_batches: int, precision: Precision | None = None) -> int:
        """Return the peak memory of a process in bytes."""
        kind = precision or self.plan.precision
        parts, size = self.step_memory(kind, layout), self.batch_size
        if layout.pipeline == 1:
            return peak_bytes(parts, layout, batch_size=size, micro_batches=micro_batches, exact=self._exact)
        staged, traced = self.pipeline_memory(layout), self.step_memory(self.plan.precision, layout)
        if staged is None:
            return even_pipeline_peak(parts, layout, batch_size=size, micro_batches=micro_batches)
        return pipeline_peak(
            parts, staged, layout, batch_size=size, micro_batches=micro_batches, traced=traced
        )

    def default_micro_batches(self, layout: ParallelLayout) -> int:
        """Return the number of micro-batches without memory pressure; a pipeline uses two per stage."""
        if layout.pipeline == 1 or self._fixed_micro_batches:
            return self.plan.micro_batches
        return max(self.plan.micro_batches, min(2 * layout.pipeline * layout.data, self.batch_size))

    def may_split_batches(self, parallel: Parallel, processes: int) -> bool:
        """Return whether micro-batches are added automatically: with `auto`, or after a GPU ran out of memory."""
        if processes == 1:
            return self.device == "cuda" and not self._exact
        return parallel == "auto" and not self._exact and not self._fixed_micro_batches

    def can_shard(self) -> bool:
        return can_be_sharded(self._model)

    def can_split_tensors(self, size: int) -> bool:
        """Return whether layers can be split in `size` parts for tensor parallelism."""
        try:
            return size > 1 and bool(find_cuts(self._model, self._tensor_plan, size=size))
        except InvalidTraining:
            return False

    def can_partition(self) -> bool:
        """Return whether the model can be partitioned, which replaces parameters: an existing optimizer would not
        know them."""
        return not self._exact and not isinstance(self._optimizer, optim.Optimizer)

    def can_pipeline(self, layout: ParallelLayout) -> bool:
        """Return whether the model can be cut into the stages of `layout` and its stages can be traced."""
        if self.plan.precision == "fp16":
            return False
        try:
            return self.pipeline_memory(layout) is not None
        except InvalidTraining:
            return False

    def pipeline_memory(self, layout: ParallelLayout) -> PipelineMemory | None:
        """Return the memory of the stages; None if they cannot be traced. Raise InvalidTraining if there can be
        none."""
        count = layout.pipeline
        if count not in self._known_stages:
            samples = samples_per_micro_batch(self.batch_size, layout, self.default_micro_batches(layout))
            self._known_stages[count] = self._find_stages(self.plan, count, samples)
        return self._known_stages[count]

    def step_memory(self, precision: Precision, layout: ParallelLayout) -> StepMemory:
        """Return the memory of a step, traced for the micro-batch size of the first `layout` that was requested."""
        if self._usual is None:
            self._usual = samples_per_micro_batch(self.batch_size, layout, self.plan.micro_batches)
        if precision not in self._known:
            self._known[precision] = self._find(replace(self.plan, precision=precision), self._usual)
        return self._known[precision]

    def _find(self, plan: Plan, usual: int) -> StepMemory:
        from falaj.training.runtime.memory.tracing import without_side_effects

        with without_side_effects():
            return self._look_up(plan, usual)

    def _look_up(self, plan: Plan, usual: int) -> StepMemory:
        sample = self._sample()
        key = self._key(plan, sample, usual)
        if (kept := load_step_memory(key)) is not None:
            return kept
        traces, method = self._traces(plan, sample, usual)
        largest, outside = block_bytes(self._model)
        cuts = self._cut_layers()
        cut = sum(p.nbytes for name in cuts for p in self._model.get_submodule(name).parameters())
        parts = StepMemory(
            traces=traces,
            largest_block=largest,
            outside_blocks=outside,
            cut=cut,
            cut_activations=self._cut_activations(plan, sample, traces[0], cuts),
            method=method,
        )
        store_step_memory(key, parts)
        return parts

    def _find_stages(self, plan: Plan, count: int, samples: int) -> PipelineMemory | None:
        from falaj.training.runtime.memory.pipeline_tracing import trace_stages

        sample, cuts = self._sample(), self._pipeline_cuts
        key = self._key(plan, sample, samples, stages=count, cuts=None if cuts is None else list(cuts))
        if (kept := load_pipeline_memory(key)) is not None:
            return kept
        try:
            found = trace_stages(
                *(self._model, self._loss, sample),
                count=count,
                cuts=cuts,
                cut_layers=list(self._cut_layers()),
                samples=samples,
                plan=plan,
                device=self.device,
            )
        except InvalidTraining:
            raise
        except Exception:  # any error of the user's model on fake tensors
            return None
        store_pipeline_memory(key, found)
        return found

    def _sample(self) -> Any:
        from falaj.training.runtime.memory.tracing import without_side_effects

        with without_side_effects():
            return self._source.read(torch.zeros(1, dtype=torch.int64), seed=0)

    def _key(self, plan: Plan, sample: Any, samples: int, **more: Any) -> str | None:
        options = {
            "samples": samples,
            "device": self.device,
            **{name: getattr(plan, name) for name in ("precision", "layout", "fused")},
            "tensor_plan": sorted((self._tensor_plan or {}).items()),
            **more,
        }
        return memory_key(self._model, self._loss, self._optimizer, sample, options)

    def _traces(self, plan: Plan, sample: Any, usual: int) -> tuple[tuple[StepTrace, ...], str]:
        """Trace the usual number of samples and half of it; a few real samples if the model cannot run on fake
        tensors."""
        from falaj.training.runtime.memory.sample_tracing import trace_samples
        from falaj.training.runtime.memory.tracing import trace_step

        given = (self._model, self._loss, self._optimizer)

        def fake(count: int) -> StepTrace:
            return trace_step(*given, sample, samples=count, plan=plan, device=self.device)

        def real(count: int) -> StepTrace:
            batch = self._source.read(torch.arange(count), seed=0)
            return trace_samples(*given, batch, samples=count, plan=plan, device=self.device)

        try:
            return _one_or_two(fake, usual), "traced"
        except Exception as failure:  # any error of the user's model on fake tensors
            reason = failure
        try:
            return _one_or_two(real, min(2, len(self._source))), "sampled"
        except Exception as failure:
            raise NoEstimate(
                f"the memory of this model cannot be estimated: on fake tensors {_short(reason)}; "
                f"on samples {_short(failure)}"
            ) from failure

    def _cut_layers(self) -> dict[str, Cut]:
        """Return the layers that tensor parallelism splits."""
        try:
            return find_cuts(self._model, self._tensor_plan, size=1)
        except InvalidTraining:
            return {}

    def _cut_activations(self, plan: Plan, sample: Any, whole: StepTrace, cuts: dict[str, Cut]) -> float:
        """Return the share of the activations that is split with the layers; 0 if it cannot be traced."""
        from falaj.training.runtime.memory.tracing import trace_step

        if not cuts or not self.can_split_tensors(2):
            return 0.0
        if self.plan.precision in self._known:  # about the same share in any precision
            return self._known[self.plan.precision].cut_activations
        try:
            half = trace_step(
                *(self._model, self._loss),
                "sgd",
                sample,
                samples=whole.samples,
                plan=plan,
                device=self.device,
                halved=cuts,
            )
        except Exception:  # the halved model need not be computable
            return 0.0
        return min(1.0, max(0.0, 2 - 2 * half.activations / max(1, whole.activations)))


def _one_or_two(trace: Callable[[int], StepTrace], usual: int) -> tuple[StepTrace, ...]:
    """Trace `usual` samples, and half of them where that works: batch normalization rejects a single sample."""
    first = trace(usual)
    if usual < 2:
        return (first,)
    try:
        return first, trace(usual // 2)
    except Exception:  # the model may reject few samples
        return (first,)


def _short(failure: BaseException) -> str:
    return (str(failure).strip().split("\n")[0] or type(failure).__name__)[:200]
