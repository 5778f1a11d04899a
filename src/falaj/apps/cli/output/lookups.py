"""Where to look for something that was not found: the command that lists what there is."""

from __future__ import annotations

import re

LIST_COMMANDS = {
    "alert": "monitoring alerts",
    "blob": "blobs list",
    "dataset": "features training-sets",
    "endpoint": "endpoints list",
    "group": "groups list",
    "job": "jobs list",
    "model": "models list",
    "monitor": "monitoring list",
    "optimization": "optimization list",
    "pipeline": "pipelines list",
    "queue": "queues show",
    "secret": "secrets list",
    "user": "users list",
    "view": "features list",
    "work": "workflows list",
    "workspace": "workspaces list",
    "zone": "zones list",
}
_UNKNOWN = re.compile(r"there is no (?P<kind>[a-z_]+) '(?P<name>[^']*)'")


def list_command(message: str) -> str | None:
    """The command, without `falaj`, that lists what there is instead; none if the message does not tell."""
    found = _UNKNOWN.search(message)
    if found is None:
        return None
    if found["kind"] == "model_version":
        model = found["name"].partition("@")[0]
        return f"models versions {model}" if re.fullmatch(r"[a-z0-9._/-]+", model) else "models list"
    return LIST_COMMANDS.get(found["kind"])
