"""Decides how user code is started here, or that it is not started at all."""

from __future__ import annotations

from typing import Literal, get_args

from falaj.errors import Fault, IsolationRefused
from falaj.ports.sandbox import MachineFacts, Mechanism
from falaj.records.doctor import Finding
from falaj.records.record import Record

Preference = Literal["auto", "bubblewrap", "uid", "same-uid"]
Protection = Literal["files", "jobs", "platform", "writes", "network", "children"]

DESCRIPTIONS: dict[Protection, str] = {
    "files": "the platform's keys, database and other files",
    "jobs": "the files and processes of other jobs",
    "platform": "the platform's processes: memory, environment and signals",
    "writes": "what lies outside the job's own directory, from being written",
    "network": "the network, unless the job is granted it",
    "children": "the machine from processes that outlive their job",
}


class Isolation(Record):
    """The way user code is started in this home, why, and what is protected from it."""

    mechanism: Mechanism
    reason: str
    protects: tuple[Protection, ...]

    @property
    def exposes(self) -> tuple[Protection, ...]:
        """What stays within the reach of user code."""
        return tuple(kind for kind in get_args(Protection) if kind not in self.protects)


def decide(facts: MachineFacts, *, users: int, prefer: Preference = "auto") -> Isolation:
    """The strongest mechanism of this machine, or the one that is preferred.

    IsolationRefused where a preferred mechanism cannot be had, and where user code would run with the
    platform's own rights in a home with more than one user.
    """
    faults = {"bubblewrap": bubblewrap_fault(facts), "uid": uid_fault(facts)}
    wanted: list[Literal["bubblewrap", "uid"]] = ["bubblewrap", "uid"]
    if prefer != "auto":
        wanted = [name for name in wanted if name == prefer]
    for name in wanted:
        if faults[name] is None:
            return Isolation(
                mechanism=name, reason=chosen_because(name, facts), protects=protections(name, facts)
            )
    missing = [fault for name in wanted if (fault := faults[name]) is not None]
    if prefer in ("bubblewrap", "uid"):
        raise IsolationRefused(f"user code cannot be started as configured ({prefer})", faults=missing)
    if users > 1:
        raise refusal(missing, users=users)
    return Isolation(mechanism="same-uid", reason=chosen_because("same-uid", facts), protects=())


def refusal(missing: list[Fault], *, users: int) -> IsolationRefused:
    """Why a home with several users runs no user code here, and what would change that."""
    asked = Fault(
        where="isolation same-uid", given=f"{users} users", allowed="a home with one user", fix="use auto"
    )
    return IsolationRefused(
        f"user code would run with the platform's own rights, and this home has {users} users",
        faults=missing or [asked],
    )


def protections(mechanism: Mechanism, facts: MachineFacts) -> tuple[Protection, ...]:
    """What `mechanism` protects on this machine."""
    if mechanism == "same-uid":
        return ()
    held: set[Protection] = {"files", "platform"}
    if mechanism == "bubblewrap" or len(facts.spare_uids) > 1:
        held.add("jobs")
    if mechanism == "bubblewrap" or facts.unshare:
        held |= {"network", "children"}
    if mechanism == "bubblewrap":
        held.add("writes")
    return tuple(kind for kind in get_args(Protection) if kind in held)


def chosen_because(mechanism: Mechanism, facts: MachineFacts) -> str:
    if mechanism == "bubblewrap":
        return (
            "bubblewrap works here: a job sees the system, Python, its inputs and its own directory, no more"
        )
    if mechanism == "uid":
        return "the platform is root and starts each job as a uid that owns nothing but the job's directory"
    rights = "root's rights" if facts.is_root else "the rights of the platform's own user"
    return f"nothing keeps user code apart from the platform here: it runs with {rights}"


def bubblewrap_fault(facts: MachineFacts) -> Fault | None:
    """Why bubblewrap cannot be used, and the fix; None where it can."""
    if facts.bubblewrap_works:
        return None
    if facts.bubblewrap is None:
        given, fix = "bwrap is not installed", "install the package bubblewrap, from 0.5 on"
    elif facts.is_root and (facts.setpriv is None or not facts.spare_uids):
        given = "as root it also needs setpriv and a spare uid"
        fix = "install the package util-linux, and map spare uids into this container"
    elif not facts.is_root and not facts.user_namespaces:
        given = facts.bubblewrap_fault or "unprivileged user namespaces are off"
        fix = (
            "enable unprivileged user namespaces: sysctl user.max_user_namespaces above 0, and where they "
            "exist kernel.unprivileged_userns_clone=1 and kernel.apparmor_restrict_unprivileged_userns=0"
        )
    else:
        given = facts.bubblewrap_fault or "bwrap fails"
        fix = "give the platform the right to mount and to make namespaces (in a container: CAP_SYS_ADMIN)"
    return Fault(where="bubblewrap", given=given, allowed="a bwrap that starts Python", fix=fix)


def uid_fault(facts: MachineFacts) -> Fault | None:
    """Why user code cannot run as another uid, and the fix; None where it can."""
    if facts.is_root and facts.uid_works and facts.spare_uids:
        return None
    if not facts.is_root:
        given, fix = "the platform is not root", "run the platform as root, with a spare uid for jobs"
    elif facts.setpriv is None:
        given, fix = "setpriv is not installed", "install the package util-linux"
    elif not facts.spare_uids:
        given, fix = "no spare uid", "map more uids into this container, or name an unused uid for jobs"
    else:
        given = facts.uid_fault or f"{facts.python} does not start as another uid"
        fix = f"let other users reach {facts.python}: o+rx on it and on every folder above it"
    return Fault(where="another uid", given=given, allowed="root, setpriv and a spare uid", fix=fix)


def report(facts: MachineFacts, *, users: int, prefer: Preference = "auto") -> list[Finding]:
    """The rows of `falaj doctor` on isolation: the decision first, then each mechanism."""
    try:
        decision = decide(facts, users=users, prefer=prefer)
    except IsolationRefused as refused:
        fixes = "; or ".join(fault.fix for fault in refused.faults if fault.fix)
        finding = Finding(
            check="isolation", status="fail", words=f"jobs are refused: {refused.message}", fix=fixes
        )
        return [finding, *mechanism_rows(facts, chosen=None)]
    return [decision_row(decision, facts), *mechanism_rows(facts, chosen=decision.mechanism)]


def decision_row(decision: Isolation, facts: MachineFacts) -> Finding:
    words = f"{decision.mechanism}: {decision.reason}"
    if not decision.exposes:
        return Finding(check="isolation", status="ok", words=words)
    exposed = "; ".join(DESCRIPTIONS[kind] for kind in decision.exposes)
    better = bubblewrap_fault(facts)
    return Finding(
        check="isolation",
        status="warn",
        words=f"{words}. Not protected: {exposed}",
        fix=better.fix if better else "let the platform choose bubblewrap",
    )


def mechanism_rows(facts: MachineFacts, *, chosen: Mechanism | None) -> list[Finding]:
    """One row for bubblewrap and one for another uid; a gap is no fault while the other one is in use."""
    rows = []
    for check, fault in [("bubblewrap", bubblewrap_fault(facts)), ("uid", uid_fault(facts))]:
        if fault is None:
            words = "in use" if chosen == check else "available"
            rows.append(Finding(check=f"isolation.{check}", status="ok", words=words))
        elif chosen in ("bubblewrap", "uid"):
            words = f"not available ({fault.given}), and not needed"
            rows.append(Finding(check=f"isolation.{check}", status="ok", words=words))
        else:
            words = f"not available: {fault.given}"
            rows.append(Finding(check=f"isolation.{check}", status="warn", words=words, fix=fault.fix))
    return rows
