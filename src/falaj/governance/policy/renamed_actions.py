"""Names that actions had before, for errors that name the new ones. Migration 0014 renamed those in the database."""

from __future__ import annotations

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


def new_name(action: str) -> str | None:
    """Return the name that an action has now; none if it was not renamed."""
    group, dot, verb = action.partition(".")
    found = OPERATIONS.get(action) or f"{GROUPS.get(group, group)}{dot}{verb}"
    return None if found == action else found
