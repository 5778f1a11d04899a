"""Operation names as they are from now on, wherever the database holds them.

Groups are plural, and some verbs have the names that people know. The audit log is history: its entries keep the names
under which they were written, because their hashes cover them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"

GROUPS = {
    "blob": "blobs",
    "user": "users",
    "group": "groups",
    "token": "tokens",
    "policy": "policies",
    "workspace": "workspaces",
    "object": "objects",
    "secret": "secrets",
    "queue": "queues",
    "node": "nodes",
    "zone": "zones",
    "work": "workflows",
}
OPERATIONS = {
    "audit.grown": "audit.consistency_proof",
    "audit.prove": "audit.inclusion_proof",
    "monitoring.rebase": "monitoring.set_reference",
    "platform.tidy": "platform.cleanup",
    "blob.sweep": "blobs.cleanup",
    "token.link": "tokens.sign_in_link",
    "queue.past": "queues.history",
    "queue.keep_what_if": "queues.save_what_if",
    "jobs.make_room": "jobs.preempt_for",
    "jobs.settle": "jobs.finish",
    "runs.attach": "runs.log_artifact",
}

ACTION_IN_POLICY = re.compile(r'(Action\s*::\s*")([a-z]+\.[a-z_]+)(")')
ACTION_IN_SCOPE = re.compile(r"(')([a-z]+\.(?:\*|[a-z_]+))(')")


def upgrade() -> None:
    for table in ("governance_idempotency", "governance_activities"):
        _rename_values(table, "action")
    _rename_values("governance_outbox", "type", prefix="falaj.")
    _rename_values("control_work", "workflow")
    for table in ("governance_tokens", "control_work", "training_jobs"):
        _rewrite(table, ("id",), "actions", _renamed_list)
    _rewrite(
        "governance_policies",
        ("id", "version"),
        "text",
        lambda text: ACTION_IN_POLICY.sub(_renamed_match, text),
    )
    scope = ("caller", "key")
    _rewrite("governance_idempotency", scope, "input", lambda text: ACTION_IN_SCOPE.sub(_renamed_match, text))
    op.execute("UPDATE governance_epochs SET epoch = epoch + 1")


def renamed(name: str) -> str:
    """The operation `name` or the pattern `group.*` as it is called now."""
    group, dot, verb = name.partition(".")
    return OPERATIONS.get(name) or f"{GROUPS.get(group, group)}{dot}{verb}"


def _renamed_list(text: str) -> str:
    return json.dumps([renamed(name) for name in json.loads(text)], sort_keys=True, separators=(",", ":"))


def _renamed_match(found: re.Match[str]) -> str:
    return f"{found[1]}{renamed(found[2])}{found[3]}"


def _rename_values(table: str, column: str, *, prefix: str = "") -> None:
    """Rename each operation that stands alone in `column`, behind `prefix`."""
    rows = sa.table(table, sa.column(column))
    values, bind = rows.c[column], op.get_bind()
    for old in bind.execute(sa.select(values).distinct()).scalars().all():
        new = prefix + renamed(old.removeprefix(prefix)) if old.startswith(prefix) else old
        if new != old:
            bind.execute(sa.update(rows).where(values == old).values({column: new}))


def _rewrite(table: str, key: tuple[str, ...], column: str, change: Callable[[str], str]) -> None:
    """Put `change` of its text into `column` of every row of `table`, whose primary key is `key`."""
    rows = sa.table(table, *map(sa.column, key), sa.column(column))
    bind = op.get_bind()
    for *ident, text in bind.execute(sa.select(rows).where(rows.c[column].is_not(None))).all():
        new = change(text)
        if new != text:
            matches = [rows.c[name] == value for name, value in zip(key, ident, strict=True)]
            bind.execute(sa.update(rows).where(*matches).values({column: new}))
