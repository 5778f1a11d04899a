"""Prints queues as a tree with bars, one queue in full, and budgets."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from falaj.apps.cli.output.tables import show_fields, show_rows
from falaj.apps.cli.output.values import encodable, format_exact, format_number, format_value, printable
from falaj.records.scheduling.accounting import BudgetState, QueueState
from falaj.records.sizes import format_size

BAR = 10
HEADINGS = ("queue", "run", "wait", "GPUs", "CPUs", "memory", "weight", "share", "history", "score")
FIELDS = ("gpus", "cpus", "memory_bytes")


def print_tree(found: Sequence[QueueState]) -> None:
    """Print every queue below its parent, with its use and quota."""
    if not found:
        print("none", file=sys.stderr)
        return
    known = {each.name: each for each in found}
    roots = [each for each in found if each.settings.parent not in known]
    rows: list[list[str]] = []
    waiting = [(each, "", "") for each in reversed(roots)]
    while waiting:
        each, lead, below = waiting.pop()
        rows.append([encodable(cell) for cell in _row(each, lead)])
        children = [known[name] for name in each.children if name in known]
        marks = [("├─ ", "│  ")] * (len(children) - 1) + [("└─ ", "   ")]
        pairs = [
            (child, below + mark, below + rest) for child, (mark, rest) in zip(children, marks, strict=False)
        ]
        waiting += reversed(pairs)
    show_rows(HEADINGS, rows)


def print_queue(found: QueueState) -> None:
    """Print all fields of one queue."""
    settings = found.settings
    whose = ", ".join(printable(name) for name in settings.workspaces)
    hidden = f"{found.unseen} that you may not see" if found.unseen else ""
    show_fields(
        {
            "name": settings.name,
            "parent": settings.parent or "-",
            "children": ", ".join(found.children) or "-",
            "GPUs": encodable(_held(found, "gpus")),
            "CPUs": encodable(_held(found, "cpus")),
            "memory": encodable(_held(found, "memory_bytes")),
            "borrowed": _borrowed(found) or "nothing",
            "jobs": f"{found.running} running, {found.waiting} waiting",
            "weight": format_exact(settings.weight),
            "share": f"{found.share:.1%} of the cluster now, {found.history:.1%} recently",
            "score": f"{format_number(found.score)}, the lowest is scheduled first",
            "open to": " and ".join(part for part in (whose, hidden) if part) or "all workspaces",
        }
    )


def print_budgets(found: Sequence[BudgetState]) -> None:
    """Print one row for each budget."""
    if not found:
        print("none", file=sys.stderr)
        return
    rows = [
        [
            printable(each.terms.workspace),
            each.terms.period,
            format_value(each.since),
            _spent(each.used_gpu_hours, each.terms.gpu_hours, each.left_gpu_hours, ""),
            _spent(each.used_money, each.terms.money, each.left_money, f" {each.currency or ''}".rstrip()),
        ]
        for each in found
    ]
    show_rows(["workspace", "period", "since", "GPU-hours", "money"], rows)


def _row(each: QueueState, lead: str) -> list[str]:
    return [
        lead + each.name,
        str(each.running),
        str(each.waiting),
        *(_held(each, field) for field in FIELDS),
        format_exact(each.settings.weight),
        f"{each.share:.1%}",
        f"{each.history:.1%}",
        f"{each.score:.3f}",
    ]


def _held(each: QueueState, field: str) -> str:
    """Return a bar and its numbers."""
    held = getattr(each.held, field)
    quota = getattr(each.settings.quota, field)
    limit = quota if each.settings.limit is None else getattr(each.settings.limit, field)
    if quota is None:
        return _figure(held, field)
    more = "" if limit == quota else f", up to {'all' if limit is None else _figure(limit, field)}"
    return f"{_bar(held, quota if limit is None else limit)} {_figure(held, field)} of {_figure(quota, field)}{more}"


def _bar(held: float, whole: float) -> str:
    filled = min(round(held / whole * BAR), BAR) if whole else 0
    return "█" * filled + "░" * (BAR - filled)


def _figure(value: float, field: str) -> str:
    return format_size(int(value)) if field == "memory_bytes" and value else format_exact(value)


def _borrowed(each: QueueState) -> str:
    words = {"gpus": "GPUs", "cpus": "CPUs", "memory_bytes": "of memory"}
    return ", ".join(
        f"{_figure(amount, field)} {word}"
        for field, word in words.items()
        if (amount := getattr(each.borrowed, field))
    )


def _spent(used: float, given: float | None, left: float | None, unit: str) -> str:
    if given is None or left is None:
        return "-"
    state = f"{left:.2f} left" if left >= 0 else f"{-left:.2f} over"
    return f"{used:.2f} of {format_exact(given)}{unit}, {state}"
