"""The processes and roles that each framework allows in a job."""

from __future__ import annotations

from collections.abc import Mapping

ROLES: dict[str, tuple[str, ...]] = {"tensorflow": ("chief", "worker", "ps"), "mxnet": ("worker", "server")}
"""The roles that a framework tells apart. MXNet's scheduler is not counted: it does no work."""

MOST_PROCESSES = 10_000
"""The most processes of a job on all its nodes: each has a port of its own, below those that systems hand out."""


def process_fault(
    framework: str, *, nodes: int, processes: int, processes_min: int | None, roles: Mapping[str, int]
) -> str | None:
    """Return the fault in the processes that a job requests, or none."""
    if nodes * processes > MOST_PROCESSES:
        return f"{nodes} nodes of {processes} processes are {nodes * processes} processes: {MOST_PROCESSES} at most"
    if processes_min is not None:
        if framework != "torch":
            return f"processes_min is for the framework torch, whose training can shrink; this job's is {framework}"
        if processes_min > processes:
            return f"processes_min is {processes_min}, but processes is {processes}: it can be at most that"
    return role_fault(framework, nodes, processes, roles) if roles else None


def role_fault(framework: str, nodes: int, processes: int, roles: Mapping[str, int]) -> str | None:
    if framework not in ROLES:
        return f"roles are for the frameworks {' and '.join(ROLES)}; this job's is {framework}"
    known = ROLES[framework]
    strangers = sorted(set(roles) - set(known))
    if strangers:
        return f"{framework} has no role {', '.join(strangers)}; its roles are {', '.join(known)}"
    total = sum(roles.values())
    if total != nodes * processes:
        if nodes == 1:
            return f"the roles add up to {total}, but processes is {processes}: set processes to {total}"
        return (
            f"the roles add up to {total}, but {nodes} nodes of {processes} processes are {nodes * processes}: roles "
            "count the processes of all nodes"
        )
    if roles.get("chief", 0) > 1:
        return f"there is one chief at most, not {roles['chief']}"
    missing = [role for role in needed(roles, known) if not roles.get(role)]
    return f"{framework} also needs a {missing[0]}" if missing else None


def needed(roles: Mapping[str, int], known: tuple[str, ...]) -> tuple[str, ...]:
    """Servers are no use without workers, nor workers of MXNet without a server; a chief can be alone."""
    if "server" in known:
        return known
    return ("worker",) if roles.get("ps") or not roles.get("chief") else ()
