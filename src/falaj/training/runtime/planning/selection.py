"""Selection of the plan of a run: from its checkpoint, from the caller, from the cache, or by a search."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from falaj.training.runtime.agent.agents import Agent
from falaj.training.runtime.agent.heartbeat import beat_for_job
from falaj.training.runtime.checkpointing.storage.manifest import saved_runs
from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.data.sources import DatasetSource, SampleSource
from falaj.training.runtime.errors import OutOfMemory, SampleUnreadable, TrainingError
from falaj.training.runtime.options import INITIAL_BATCH_SIZE, FitOptions
from falaj.training.runtime.parallel.process_group import ProcessGroup
from falaj.training.runtime.planning.cache import load_plan, plan_key, store_plan
from falaj.training.runtime.planning.candidates import SearchSpace
from falaj.training.runtime.planning.dataloading_search import DataloadingTrials, search_dataloading
from falaj.training.runtime.planning.fingerprint import fingerprint_of
from falaj.training.runtime.planning.plan import Plan, plan_from
from falaj.training.runtime.planning.search import (
    RehearsedTrials,
    SearchResult,
    SubprocessTrials,
    confirm,
    format_outcomes,
    search,
)
from falaj.training.runtime.planning.trial_process import TrialProcessLost, can_fork_for_gpu
from falaj.training.runtime.planning.trials import TrialOutcome, TrialRunner, reason_of
from falaj.training.runtime.step.calling import Loss
from falaj.training.runtime.step.cuda_graph import list_tensors
from falaj.training.runtime.step.out_of_memory import is_out_of_memory
from falaj.training.runtime.step.rng import preserved_rng_state

MAX_SEARCH_S = 60.0
SHARE_OF_RUN = 0.1
MIN_STEPS = 100
MIN_SEARCH_S = 2.0
"""A search that may not take this long is skipped."""
MIN_FLOPS = {"cpu": 2e11, "cuda": 5e14}
LONG_RUN_STEPS = {"cpu": 2_000, "cuda": 5_000}
"""Estimated floating-point operations, or steps, from which on a run is long enough for a search."""
CPU_MARGIN, GPU_MARGIN = 1.05, 1.015


def select_plan(
    model: nn.Module,
    loss: Loss,
    source: SampleSource,
    options: FitOptions,
    agent: Agent | None,
    world: ProcessGroup,
) -> Plan:
    """Return the plan of this run, the same for all its processes."""
    tune, fixed = options.compute.tune, options.fixed
    plain = plan_from({**fixed, "micro_batches": options.micro_batches_over(world.size)})
    exact = options.parallelism.exact
    if isinstance(tune, Plan):  # an exact run keeps its micro-batches for any number of processes
        pieces = {"micro_batches": plain.micro_batches} if exact else {}
        return replace(tune, **{**fixed, **pieces})  # type: ignore[arg-type]
    if exact:
        return plain
    if world.size > 1:
        return replace(leader_plan(agent, world, plain), **fixed, graph=False)  # type: ignore[arg-type]
    if agent is not None and (kept := checkpointed_plan(agent, world)) is not None:
        return replace(kept, **fixed)  # type: ignore[arg-type]
    if tune == "off":
        return plain
    try:
        with preserved_rng_state():
            if not is_worth_searching(model, source, options, world):
                return plain
            return PlanSelector(model, loss, source, options, agent, world, plain).choose()
    except SampleUnreadable:  # the run would fail at the same sample later
        raise
    except Exception as failure:  # if the run has the same problem, it raises its own error
        notify: Callable[[str], None] = agent.notify if agent else print
        notify(f"plan search skipped: {reason_of(failure)}")
        return plain


def leader_plan(agent: Agent | None, world: ProcessGroup, plain: Plan) -> Plan:
    """Return the plan of the leading process, for all processes; only that one reads the checkpoints."""
    kept = checkpointed_plan(agent, world) if agent else None
    own = bytearray(json.dumps((kept or plain).facts()).encode()) if world.is_leader else None
    shared = world.broadcast_bytes(own)
    return plan_from(json.loads(bytes(shared))) if shared else plain


def checkpointed_plan(agent: Agent, world: ProcessGroup) -> Plan | None:
    """Return the plan of the newest checkpoint: a resumed run keeps its plan."""
    for run in saved_runs(agent):
        try:
            facts = run["facts"]
            modes = {True: "default", False: "off"}
            mode = modes.get(facts["compile"], facts["compile"])
            values = {**facts, "micro_batches": facts["accumulate"], "compile": mode}
            plan = plan_from({**values, "threads": facts.get("chosen_threads") or None})
        except (TrainingError, KeyError, TypeError):
            continue
        return plan if facts.get("device") == world.device.type else replace(plan, graph=False, threads=None)
    return None


def is_worth_searching(
    model: nn.Module, source: SampleSource, options: FitOptions, world: ProcessGroup
) -> bool:
    """Return whether the run may be long enough for a search to pay off, without running any of it."""
    device = world.device.type
    if device not in MIN_FLOPS:
        return False
    if options.compute.tune_seconds is not None:
        return True
    steps, size = planned_steps(source, options), planned_batch(source, options)
    if steps < MIN_STEPS:
        return False
    if steps >= LONG_RUN_STEPS[device]:
        return True
    parameters = sum(p.numel() for p in model.parameters())
    sample = list_tensors(source.read(torch.zeros(1, dtype=torch.int64), seed=0))
    return 6.0 * parameters * size * steps * uses_per_sample(sample) >= MIN_FLOPS[device]


def uses_per_sample(sample: list[Tensor]) -> float:
    """Estimate how often each parameter is used per sample: tokens of a text, pixels of an image."""
    first = sample[0] if sample else torch.zeros(1)
    if not first.is_floating_point():
        return float(first.numel())
    return max(1.0, math.prod(first.shape[2:]) / 16)


def planned_batch(source: SampleSource, options: FitOptions) -> int:
    given = options.batching.batch_size
    return min(len(source), INITIAL_BATCH_SIZE) if given == "auto" else given


def planned_steps(source: SampleSource, options: FitOptions) -> int:
    batching = options.batching
    plan = BatchPlan(
        len(source), planned_batch(source, options), batching.seed, batching.drop_last, batching.shuffle
    )
    return batching.steps or (batching.epochs or 0) * plan.steps_per_epoch


class PlanSelector:
    """Finds the plan of a run in the cache, or by a search."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        source: SampleSource,
        options: FitOptions,
        agent: Agent | None,
        world: ProcessGroup,
        plain: Plan,
    ) -> None:
        self._model, self._source, self._options = model, source, options
        self._agent, self._device, self._plain = agent, world.device, plain
        self._trials = TrialRunner(model, loss, source, options, world.device)
        self._notify: Callable[[str], None] = agent.notify if agent else print
        self._loss = loss

    def choose(self) -> Plan:
        key = self._key()
        if (kept := load_plan(key)) is not None:
            self._notify(f"plan: {kept.summary} (from the cache, for this model and hardware)")
            self._log_parameters({"plan": kept.summary})
            return kept
        if self._device.type == "cpu" and not self._is_long_enough():
            return self._plain
        self._notify("searching for the fastest plan for this model and hardware")
        _ = self._trials.sample  # shared by all trials, also in child processes
        found = self._search()
        if not found.tried:
            return self._plain
        if found.best is None and len(found.tried) == 1:
            self._notify(f"plan search skipped: {found.tried[0].rejection}")
            return self._plain
        plan, shown, seconds = found.plan or self._plain, format_outcomes(found), found.seconds
        read = self._search_reading(found)
        if read is not None and read.plan is not None:
            plan, seconds = read.plan, seconds + read.seconds
            shown += f"\ndata loading:\n{format_outcomes(read)}" if read.tried else ""
        self._notify(f"plan: {plan.summary} (found in {seconds:.0f} s)\n{shown}")
        self._log_parameters({"plan": plan.summary, "plan.tried": shown})
        if found.best is not None:
            tried = found.tried + (read.tried if read else [])
            store_plan(key, plan, table=[outcome.facts() for outcome in tried])
        return plan

    def _search_reading(self, found: SearchResult) -> SearchResult | None:
        """Search for the best way to read the dataset with the best plan; None if it is fixed."""
        best, source = found.best, self._source
        if best is None or not isinstance(source, DatasetSource) or "workers" in self._options.fixed:
            return None
        trials = DataloadingTrials(self._trials, source, self._options, computing=best.samples_per_second)
        allowed_s = self._budget(found.tried[0]) - found.seconds
        share = best.samples_per_second * self._trials.sample[1]
        try:
            return search_dataloading(source, best.plan, trials, share=share, allowed_s=allowed_s)
        finally:
            self._trials.restore()

    def _search(self) -> SearchResult:
        if self._device.type == "cpu":
            return self._search_on_cpu()
        if can_fork_for_gpu():
            trials = SubprocessTrials(self._trials, alive=self._alive)
            try:
                trials.start()
                return search(self._space(risky=True), trials, budget=self._budget)
            except TrialProcessLost as loss:
                self._notify(f"trials cannot run in a child process ({loss}): trying only safe candidates")
            finally:
                trials.end()
        else:
            self._notify(
                "CUDA was initialized before fit, so trials run in this process: trying only safe candidates"
            )
        torch.cuda.init()  # type: ignore[no-untyped-call]
        with preserved_rng_state():  # now also those of the GPU
            return search(self._space(risky=False), self._try_here, budget=self._budget)

    def _search_on_cpu(self) -> SearchResult:
        trials = RehearsedTrials(self._trials, plain=self._plain, alive=self._alive)
        found = search(self._space(risky=False), trials, budget=self._budget)
        return confirm(found, trials, margin=CPU_MARGIN)

    def _try_here(self, plan: Plan, _within_s: float) -> TrialOutcome:
        self._alive()
        return self._trials.try_out(plan)

    def _space(self, *, risky: bool) -> SearchSpace:
        options, on_gpu = self._options, self._device.type == "cuda"
        optimizer = options.optimization.optimizer
        return SearchSpace(
            on_gpu=on_gpu,
            start=self._plain,
            fixed=options.fixed,
            batch_size=planned_batch(self._source, options),
            chooses_batch=options.batching.batch_size == "auto",
            samples=len(self._source),
            images=any(isinstance(module, nn.Conv2d) for module in self._model.modules()),
            fusible=isinstance(optimizer, str),
            half_precision=fast_half_precision(self._device),
            copies_batches=isinstance(self._source, DatasetSource),
            risky=risky,
            threads=torch.get_num_threads(),
            margin=GPU_MARGIN if on_gpu else CPU_MARGIN,
        )

    def _budget(self, first: TrialOutcome) -> float:
        given = self._options.compute.tune_seconds
        if given is not None:
            return given
        if not first.samples_per_second:
            return MAX_SEARCH_S
        size = planned_batch(self._source, self._options)
        run_s = planned_steps(self._source, self._options) * size / first.samples_per_second
        return min(MAX_SEARCH_S, SHARE_OF_RUN * run_s)

    def _is_long_enough(self) -> bool:
        if self._options.compute.tune_seconds is not None:
            return True
        size, steps = planned_batch(self._source, self._options), planned_steps(self._source, self._options)
        try:
            step_s = self._trials.step_seconds(self._plain)
        except (OutOfMemory, RuntimeError, MemoryError) as failure:
            if not isinstance(failure, OutOfMemory) and not is_out_of_memory(failure):
                raise
            reason = str(failure).strip().split("\n")[0]
            self._notify(f"plan search skipped: no memory for a copy of the model ({reason})")
            return False
        run_s = steps * (step_s + size * self._trials.sample[1])
        return SHARE_OF_RUN * run_s >= MIN_SEARCH_S

    def _alive(self) -> bool:
        beat_for_job()
        return self._agent is None or self._agent.heartbeat()

    def _key(self) -> str | None:
        options = self._options
        optimization = options.optimization
        try:
            loss, optimizer = (
                fingerprint_text(self._loss, self._model),
                fingerprint_text(optimization.optimizer, self._model),
            )
        except (OSError, TypeError):
            return None
        key_facts: dict[str, Any] = {
            **options.fixed,
            "loss": loss,
            "batch_size": options.batching.batch_size,
            "samples": len(self._source) if options.batching.batch_size == "auto" else 0,
            "optimizer": optimizer,
            "changing_rate": optimization.schedule != "constant" or bool(optimization.warmup),
            "clip": optimization.clip is not None,
            "dataset": type(getattr(self._source, "dataset", None)).__qualname__,
        }
        sample = self._source.read(torch.zeros(1, dtype=torch.int64), seed=0)
        return plan_key(self._model, sample, self._device, key_facts)

    def _log_parameters(self, values: Mapping[str, str]) -> None:
        if self._agent is not None:
            self._agent.params(values)


def fingerprint_text(given: object, model: nn.Module) -> str:
    """Return the fingerprint of a loss or an optimizer. Raise OSError or TypeError if it has none."""
    return str(fingerprint_of(given, by_shape=[*model.parameters(), *model.buffers()]))


def fast_half_precision(device: torch.device) -> str | None:
    """Return the 16-bit precision in which `device` is faster than in fp32, or None."""
    if device.type == "cpu":
        capable: Mapping[str, Any] = (
            torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
        )
        return "bf16" if capable.get("avx512_bf16") or capable.get("amx_bf16") else None
    return "bf16"
