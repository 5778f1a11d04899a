"""The plan search of a training, from the text that the runtime logs."""

from __future__ import annotations

import pytest

from falaj.apps.console.pages.jobs.measurements import plan_rows


def test_the_plan_search_of_the_runtime_becomes_a_table() -> None:
    pytest.importorskip("torch", reason="torch: the runtime searches for plans with it")
    from falaj.training.runtime.planning.plan import Plan
    from falaj.training.runtime.planning.search import SearchResult, format_outcomes
    from falaj.training.runtime.planning.trials import TrialOutcome

    plain, chosen, refused = Plan(), Plan(precision="bf16", compile="default"), Plan(precision="fp16")
    best = TrialOutcome(plan=chosen, samples_per_second=2468.0, seconds=3.4)
    tried = [
        TrialOutcome(plan=plain, samples_per_second=1234.0, seconds=1.2),
        best,
        TrialOutcome(plan=refused, seconds=12.0, rejection="gradients differ  by too much"),
    ]
    text = format_outcomes(SearchResult(tried=tried, best=best, seconds=20.0))

    rows = plan_rows(f"{text}\ndata loading:\n{text}\nanything else:")

    assert len(rows) == 6
    assert [row.cells["plan"] for row in rows[:3]] == [plain.summary, chosen.summary, refused.summary]
    assert (rows[1].cells["rate"], rows[1].cells["ratio"], rows[1].cells["verdict"]) == (
        "2,468",
        "2.00",
        "chosen",
    )
    assert (rows[2].cells["rate"], rows[2].cells["seconds"]) == ("", "12.0")
    assert str(rows[2].cells["verdict"]).startswith("gradients differ")
