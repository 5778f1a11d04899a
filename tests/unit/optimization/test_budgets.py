"""Budgets in words, and the extensions of CPUs that variants are kept by."""

from __future__ import annotations

import pytest

from falaj.errors import InvalidInput
from falaj.optimization.budgets import format_budget, parse_budget
from falaj.optimization.hardware import has_int8_dot, instruction_set
from falaj.records.optimization import AcceptanceBudget


@pytest.mark.parametrize(
    ("text", "metric", "worse", "relative"),
    [
        ("auc -0.002", "auc", 0.002, False),
        ("accuracy -0.5%", "accuracy", 0.005, True),
        ("log_loss +1%", "log_loss", 0.01, True),
        ("Log Loss +1 %", "log_loss", 0.01, True),
        ("rmse +0.1", "rmse", 0.1, False),
        ("auc -0", "auc", 0.0, False),
        ("rmse+2e-3", "rmse", 0.002, False),
    ],
)
def test_a_budget_is_a_metric_and_how_much_worse_it_may_be(
    text: str, metric: str, worse: float, *, relative: bool
) -> None:
    found = parse_budget(text)

    assert (found.metric, found.worse, found.relative) == (metric, pytest.approx(worse), relative)
    assert parse_budget(format_budget(found)) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("auc +0.002", 'fix      "auc -0.002"'),
        ("log_loss -1%", 'fix      "log_loss +1%"'),
        ("auc 0.002", "the sign is -"),
        ("f1 -0.1", "one of the metrics auc, accuracy, log_loss, rmse"),
        ("auc", "a metric, a sign and a number"),
        ("", "a metric, a sign and a number"),
        ("auc -nan", "a metric, a sign and a number"),
        ("auc --0.1", "a metric, a sign and a number"),
        ("rmse +1e9", "at most 10"),
    ],
)
def test_an_invalid_budget_says_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_budget(text)

    assert words in str(caught.value)


def test_the_default_budget_has_words() -> None:
    assert format_budget(AcceptanceBudget()) == "log_loss or rmse +1%"


@pytest.mark.parametrize(
    ("cpuinfo", "extensions", "dot"),
    [
        ("processor : 0\nflags\t\t: fpu sse2 fma avx2\n", ("avx2", "fma"), False),
        (
            "flags : avx2 avx512f avx512_vnni amx_int8 xsave\n",
            ("amx_int8", "avx2", "avx512_vnni", "avx512f"),
            True,
        ),
        (
            "Features\t: fp asimd asimddp asimdhp bf16 i8mm\n",
            ("asimd", "asimddp", "asimdhp", "bf16", "i8mm"),
            True,
        ),
        ("", (), False),
    ],
    ids=["avx2", "vnni and amx", "aarch64", "unknown"],
)
def test_the_extensions_of_a_cpu_are_read(cpuinfo: str, extensions: tuple[str, ...], *, dot: bool) -> None:
    found = instruction_set(cpuinfo)

    assert found == extensions
    assert has_int8_dot(found) is dot
