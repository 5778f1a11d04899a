"""Plans: their summaries, the candidates of a search, and the cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from falaj.training.runtime.errors import InvalidTraining
from falaj.training.runtime.planning.cache import load_plan, loss_fingerprint, plan_key, store_plan
from falaj.training.runtime.planning.candidates import SearchSpace
from falaj.training.runtime.planning.numerics_check import (
    NumericErrors,
    NumericsReference,
    compare,
    loss_curve_fault,
    numerics_fault,
    relative_distance,
)
from falaj.training.runtime.planning.plan import Plan, plan_from
from falaj.training.runtime.planning.search import SearchResult, confirm, format_outcomes, search
from falaj.training.runtime.planning.trials import TrialOutcome

GPU = SearchSpace(on_gpu=True, start=Plan(), fixed={}, batch_size=32, half_precision="bf16", samples=100_000)
CPU = SearchSpace(on_gpu=False, start=Plan(), fixed={}, batch_size=32, threads=2)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALAJ_CACHE", str(tmp_path / "cache"))


# ------------------------------------------------------------------------------------------- the plan


def test_a_plan_describes_its_changes() -> None:
    assert Plan().summary == "fp32"
    everything = Plan(precision="bf16", layout="channels_last", compile="default", fused=True, batch_size=64)
    assert everything.summary == "bf16, channels_last, fused, compile=default, batch 64"
    assert plan_from(everything.facts()) == everything


def test_an_invalid_plan_is_refused() -> None:
    with pytest.raises(InvalidTraining) as refusal:
        Plan(precision="fp8", layout="rows", micro_batches=0)  # type: ignore[arg-type]

    where = {fault.where for fault in refusal.value.faults}
    assert where == {"tune.precision", "tune.layout", "tune.micro_batches"}


# ---------------------------------------------------------------------------------------- the search


def speeds(rate: Callable[[Plan], float], *, bad: Callable[[Plan], str | None] = lambda _: None) -> Any:
    def try_out(plan: Plan, _: float) -> TrialOutcome:
        return TrialOutcome(plan=plan, samples_per_second=rate(plan), rejection=bad(plan), seconds=0.1)

    return try_out


def plenty(_: TrialOutcome) -> float:
    return 1000.0


def test_changes_add_up_to_the_best_plan_on_a_gpu() -> None:
    def rate(plan: Plan) -> float:
        size = plan.batch_size or 32
        factor = {"fp32": 1.0, "tf32": 2.0, "bf16": 3.0, "fp16": 3.0}[plan.precision]
        return factor * (1 + plan.fused) * (1 if plan.compile == "off" else 2) * min(size, 128)

    images = SearchSpace(**{**vars(GPU), "chooses_batch": True, "images": True})

    found = search(images, speeds(rate), budget=plenty)

    assert found.plan == Plan(
        precision="bf16", layout="channels_last", fused=True, compile="default", batch_size=128
    )
    assert [each.plan.summary for each in found.tried[:2]] == ["fp32", "bf16, channels_last, fused"]


def test_a_precision_that_is_slower_on_a_small_batch_is_tried_on_a_larger_one() -> None:
    """A small batch leaves a GPU waiting for the host, in any precision."""

    def rate(plan: Plan) -> float:
        most = {"fp32": 100.0, "tf32": 150.0, "bf16": 380.0, "fp16": 380.0}[plan.precision]
        return min(most, 3.0 * (plan.batch_size or 32))

    images = SearchSpace(**{**vars(GPU), "chooses_batch": True, "images": True})

    found = search(images, speeds(rate), budget=plenty)

    assert found.plan is not None
    assert (found.plan.precision, found.plan.batch_size) == ("bf16", 128)


def test_a_precision_that_was_refused_is_not_tried_again_on_a_larger_batch() -> None:
    def bad(plan: Plan) -> str | None:
        return "its gradients differ" if plan.precision == "bf16" else None

    images = SearchSpace(**{**vars(GPU), "chooses_batch": True, "images": True})

    found = search(images, speeds(lambda plan: 1.0 * (plan.batch_size or 32), bad=bad), budget=plenty)

    assert [each.plan.batch_size for each in found.tried if each.plan.precision == "bf16"] == [None]


def test_short_steps_are_tried_as_a_graph() -> None:
    found = search(GPU, speeds(lambda plan: 1e6 * (5 if plan.graph else 1)), budget=plenty)

    assert found.plan is not None
    assert found.plan.graph


def host_bound(plan: Plan) -> float:
    """Embedding tables and small layers: without compilation each kernel waits for the host, in any precision."""
    if plan.compile == "off":
        return 1e5 * {"fp32": 1.0, "tf32": 1.0, "bf16": 0.8, "fp16": 0.8}[plan.precision]
    return 1e5 * {"fp32": 1.5, "tf32": 2.0, "bf16": 3.0, "fp16": 3.0}[plan.precision] * (1 + 0.2 * plan.fused)


def test_a_precision_and_a_fused_update_that_pay_only_when_compiled_are_tried_compiled() -> None:
    found = search(
        GPU, speeds(host_bound, bad=lambda plan: "no graph" if plan.graph else None), budget=plenty
    )

    assert found.plan == Plan(precision="bf16", fused=True, compile="default")


def test_precisions_are_compared_as_graphs_where_a_graph_is_faster() -> None:
    def rate(plan: Plan) -> float:
        kernels = {"fp32": 1e6, "tf32": 2e6, "bf16": 3e6, "fp16": 3e6}[plan.precision]
        return kernels * (1 + 0.1 * plan.fused) if plan.graph else 1e5

    found = search(GPU, speeds(rate), budget=plenty)

    assert found.plan == Plan(precision="bf16", fused=True, graph=True)


def test_a_refused_or_clearly_slower_precision_is_not_compiled() -> None:
    def rate(plan: Plan) -> float:
        return host_bound(plan) * (0.1 if plan.precision == "tf32" else 1.0)

    def bad(plan: Plan) -> str | None:
        return "its gradients differ" if plan.precision == "bf16" or plan.graph else None

    found = search(GPU, speeds(rate, bad=bad), budget=plenty)

    compiled = {each.plan.precision for each in found.tried if each.plan.compile != "off"}
    assert compiled == {"fp32"}


def test_where_compiling_does_not_pay_only_16_bits_are_compiled_besides_the_best() -> None:
    def rate(plan: Plan) -> float:
        return 1000.0 * {"fp32": 1.0, "tf32": 1.1, "bf16": 1.05, "fp16": 1.0}[plan.precision]

    found = search(GPU, speeds(rate), budget=plenty)

    assert found.plan == Plan(precision="tf32", fused=True)
    assert [each.plan.precision for each in found.tried if each.plan.compile != "off"] == ["tf32", "bf16"]


def test_a_model_that_cannot_be_compiled_is_compiled_once() -> None:
    def bad(plan: Plan) -> str | None:
        return "torch.compile failed" if plan.compile != "off" or plan.graph else None

    found = search(GPU, speeds(host_bound, bad=bad), budget=plenty)

    assert sum(each.plan.compile != "off" for each in found.tried) == 1


def test_a_second_precision_is_compiled_only_if_there_is_time_for_it() -> None:
    def try_out(plan: Plan, _: float) -> TrialOutcome:
        took = 40.0 if plan.compile != "off" else 0.1
        return TrialOutcome(plan=plan, samples_per_second=host_bound(plan), seconds=took)

    found = search(GPU, try_out, budget=lambda _: 30.0)

    compiled = [each for each in found.tried if each.plan.compile != "off"]
    assert [each.rejection for each in compiled[:2]] == [None, "not tried: out of time"]


def test_a_compiled_step_is_tried_as_a_graph_if_the_plain_one_cannot_be_captured() -> None:
    def bad(plan: Plan) -> str | None:
        return "cannot be captured" if plan.graph and plan.compile == "off" else None

    found = search(GPU, speeds(lambda plan: host_bound(plan) * (1 + plan.graph), bad=bad), budget=plenty)

    assert found.plan == Plan(precision="bf16", fused=True, compile="default", graph=True)


def test_a_precision_is_compiled_on_a_cpu_too_if_it_was_not_clearly_slower() -> None:
    cpu = SearchSpace(**{**vars(CPU), "half_precision": "bf16", "margin": 1.05})

    found = search(cpu, speeds(lambda plan: host_bound(plan) / 1e3), budget=plenty)

    assert found.plan is not None
    assert (found.plan.precision, found.plan.compile) == ("bf16", "default")


def test_a_step_of_ten_milliseconds_is_tried_as_a_graph() -> None:
    large = SearchSpace(**{**vars(GPU), "batch_size": 4096})

    found = search(large, speeds(lambda plan: 350_000.0 * (1 + plan.graph)), budget=plenty)

    assert found.plan is not None
    assert found.plan.graph


def test_options_set_by_the_caller_are_not_searched() -> None:
    fixed = {"precision": "fp32", "compile": "off", "micro_batches": 1}
    space = SearchSpace(**{**vars(GPU), "fixed": fixed})

    found = search(space, speeds(lambda plan: 100.0), budget=plenty)

    assert {(each.plan.precision, each.plan.compile) for each in found.tried} == {("fp32", "off")}


def test_a_batch_that_does_not_fit_is_split_until_it_does() -> None:
    def bad(plan: Plan) -> str | None:
        return "out of memory (no room)" if plan.micro_batches < 4 else None

    found = search(CPU, speeds(lambda plan: 100.0, bad=bad), budget=plenty)

    assert found.plan == Plan(micro_batches=4)


def test_a_bad_candidate_is_not_chosen_however_fast() -> None:
    def bad(plan: Plan) -> str | None:
        return "its loss is not finite" if plan.precision == "bf16" else None

    fast = speeds(lambda plan: 900.0 if plan.precision == "bf16" else 100.0, bad=bad)

    found = search(GPU, fast, budget=plenty)

    assert found.plan == Plan()
    assert "its loss is not finite" in format_outcomes(found)


def test_when_the_time_is_up_the_rest_is_named_but_not_tried() -> None:
    tried: list[Plan] = []

    def try_out(plan: Plan, _: float) -> TrialOutcome:
        tried.append(plan)
        return TrialOutcome(plan=plan, samples_per_second=100.0)

    found = search(GPU, try_out, budget=lambda _: 0.0)

    assert tried == [Plan()]
    assert all(each.rejection == "not tried: out of time" for each in found.tried[1:])
    assert found.plan == Plan()


def test_a_gain_that_is_not_confirmed_is_dropped() -> None:
    plain, quick = Plan(), Plan(fused=True)
    found = SearchResult(tried=[TrialOutcome(plan=plain, samples_per_second=100.0)])
    found.best = TrialOutcome(plan=quick, samples_per_second=150.0)

    assert confirm(found, speeds(lambda _: 100.0), margin=1.05).plan == plain


def test_the_table_shows_speed_errors_and_the_choice() -> None:
    found = search(CPU, speeds(lambda plan: 200.0 if plan.fused else 100.0), budget=plenty)

    heading, first, *rest = format_outcomes(found).splitlines()

    assert heading.split() == ["plan", "samples/s", "×", "plain", "loss", "gradient", "s"]
    assert first.split()[:3] == ["fp32", "100", "1.00"]
    assert any(line.split()[:2] == ["fp32,", "fused"] and line.endswith("chosen") for line in rest)


# ---------------------------------------------------------------------------------------- the numbers


def reference(**changes: Any) -> NumericsReference:
    values = {"loss": 1.0, "gradients": [], "noise": 0.0, "spread": 0.0, "loss_curve": [1.0, 0.9]}
    return NumericsReference(**{**values, **changes})


def test_errors_within_the_tolerance_of_the_precision_pass() -> None:
    assert numerics_fault(NumericErrors(0.0, 0.05), reference(), "bf16") is None
    assert "gradients differ from fp32 by 5.0%, allowed 1.0%" in str(
        numerics_fault(NumericErrors(0.0, 0.05), reference(), "fp32")
    )
    assert "loss differs" in str(numerics_fault(NumericErrors(0.5, 0.0), reference(), "bf16"))
    assert numerics_fault(NumericErrors(float("nan"), 0.0), reference(), "bf16") is not None


def test_a_rounding_error_is_compared_with_the_noise_between_batches_up_to_a_limit() -> None:
    noisy = reference(noise=1.2)

    assert numerics_fault(NumericErrors(0.0, 0.25), noisy, "bf16") is None
    assert numerics_fault(NumericErrors(0.0, 0.35), noisy, "bf16") is not None


def test_gradients_dominated_by_rounding_are_compared_by_norm() -> None:
    given = reference(gradients=[torch.ones(4), torch.ones(2)])
    ours = [torch.ones(4), torch.tensor([-1.0, 1.0])]

    assert compare(1.0, ours, given, [True, False]) == NumericErrors(0.0, 0.0, 1.0)
    assert compare(1.0, ours, given, [True, True]).gradient > 0.5
    assert "4 times" in str(numerics_fault(NumericErrors(0.0, 0.0, 4.0), given, "bf16"))
    assert numerics_fault(NumericErrors(0.0, 0.0, float("nan")), given, "bf16") is not None


def test_gradients_of_rounding_noise_do_not_count() -> None:
    """As those of a bias before a normalization: in bf16 a thousand times those in fp32, and still negligible."""
    given = reference(gradients=[torch.ones(4), torch.full((2,), 1e-8)])
    ours = [torch.ones(4), torch.full((2,), 1e-5)]

    assert numerics_fault(compare(1.0, ours, given, [True, False]), given, "bf16") is None
    assert numerics_fault(
        compare(1.0, [torch.ones(4), torch.full((2,), 5.0)], given, [True, False]), given, "bf16"
    )


def test_diverging_losses_are_detected() -> None:
    assert loss_curve_fault([1.0, 0.91], reference(), "bf16") is None
    assert loss_curve_fault([1.0, 3.0], reference(), "bf16") is not None
    assert loss_curve_fault([1.0, float("nan")], reference(), "bf16") is not None


def test_the_distance_of_gradients() -> None:
    ones = [torch.ones(4), None]

    assert relative_distance(ones, ones) == 0.0
    assert relative_distance([torch.ones(4) * 1.1, None], ones) == pytest.approx(0.1)
    assert relative_distance([None, None], ones) == float("inf")
    assert relative_distance([torch.full((4,), float("nan")), None], ones) == float("inf")


# ------------------------------------------------------------------------------------------ the cache


def key(model: nn.Module | None = None, *, width: int = 4, **options: Any) -> str | None:
    sample = torch.zeros(1, width), torch.zeros(1, 1)
    return plan_key(model or nn.Linear(4, 1), sample, torch.device("cpu"), options)


def test_a_cached_plan_is_found_only_for_the_same_key(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(precision="bf16", fused=True)
    store_plan(key(), plan, table=[])

    assert load_plan(key()) == plan
    for other in (key(nn.Linear(4, 2)), key(width=5), key(batch_size=8)):
        assert load_plan(other) is None
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert load_plan(key()) is None


class Silent(nn.Module):
    """Its repr does not show its constructor arguments."""

    def __init__(self, heads: int, kernel: tuple[int, ...] = (3,)) -> None:
        super().__init__()
        self.heads, self.kernel = heads, kernel
        self.layer = nn.Linear(4, 4)


def test_models_that_differ_beyond_their_repr_have_separate_plans() -> None:
    assert key(Silent(2)) == key(Silent(2))
    assert len({key(Silent(2)), key(Silent(4)), key(Silent(2, (5,)))}) == 3


def test_a_model_that_uses_the_standard_library_has_a_cached_plan() -> None:
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.widths = [pair for pair in pairwise((4, 3, 2))]  # noqa: C416 - the name is what is tested
            self.net = nn.Sequential(*(nn.Linear(*pair) for pair in self.widths))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.net(x)
            return found

    one, other = (plan_key(Tower(), torch.zeros(1, 4), torch.device("cpu"), {}) for _ in range(2))

    assert one is not None
    assert one == other


def test_a_model_without_source_code_has_no_cached_plan() -> None:
    nameless = type("Nameless", (nn.Linear,), {"__module__": "nowhere"})

    store_plan(key(nameless(4, 1)), Plan(), table=[])

    assert load_plan(key(nameless(4, 1))) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 2, "plan": {}}', "null"])
def test_a_damaged_cache_is_ignored(tmp_path: Path, text: str) -> None:
    store_plan(key(), Plan(), table=[])
    (path,) = (tmp_path / "cache" / "plans").iterdir()
    path.write_text(text)

    assert load_plan(key()) is None


def test_an_invalid_cached_plan_is_ignored(tmp_path: Path) -> None:
    store_plan(key(), Plan(), table=[])
    (path,) = (tmp_path / "cache" / "plans").iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), "plan": {"precision": "fp9"}}))

    assert load_plan(key()) is None


def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FALAJ_CACHE", str(tmp_path / "file"))

    store_plan(key(), Plan(), table=[])

    assert load_plan(key()) is None


def test_losses_of_one_name_are_distinguished_by_their_code() -> None:
    first = lambda out, target: (out - target).square().mean()  # noqa: E731
    second = lambda out, target: (out - target).abs().mean()  # noqa: E731

    assert loss_fingerprint(first) != loss_fingerprint(second)
    assert loss_fingerprint(nn.MSELoss()) == loss_fingerprint(nn.MSELoss())
    assert loss_fingerprint(nn.MSELoss()) != loss_fingerprint(nn.MSELoss(reduction="sum"))
