"""The decision on the isolation of user code, as a table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from falaj.drivers.sandbox import gaps_of
from falaj.errors import IsolationRefused
from falaj.governance.isolation import Preference, decide, report
from falaj.ports.sandbox import PROMISES, MachineFacts

BARE = MachineFacts(is_root=False, python="/opt/python")
WRAPPED = replace(BARE, bubblewrap="/usr/bin/bwrap", bubblewrap_works=True, user_namespaces=True)
ROOT = replace(
    BARE,
    is_root=True,
    setpriv="/usr/bin/setpriv",
    unshare="/usr/bin/unshare",
    spare_uids=range(5000, 6000),
    uid_works=True,
)
BOTH = replace(ROOT, bubblewrap="/usr/bin/bwrap", bubblewrap_works=True)

EVERYTHING = set(PROMISES)
OPEN = {"names", "writes", "tmp"}
CONTAINER = replace(ROOT, unshare=None, spare_uids=range(65534, 65535))
LANDLOCK = replace(BARE, landlock_abi=7, landlock_works=True)
LANDLOCK_ROOT = replace(ROOT, landlock_abi=7, landlock_works=True, landlock_own_uid=True)
SHARED_ROOT = {"names", "processes", "gang-network", "tmp", "children", "sockets", "shared-memory", "modes"}
SHARED = SHARED_ROOT | {"out-of-memory"}
OWN = {"names", "processes", "gang-network", "tmp", "children"}


@pytest.mark.parametrize(
    ("facts", "users", "prefer", "mechanism", "protects"),
    [
        (WRAPPED, 1, "auto", "bubblewrap", EVERYTHING),
        (WRAPPED, 9, "auto", "bubblewrap", EVERYTHING),
        (BOTH, 9, "auto", "bubblewrap", EVERYTHING),
        (BOTH, 9, "uid", "uid", EVERYTHING - OPEN),
        (replace(BOTH, landlock_works=True), 9, "auto", "bubblewrap", EVERYTHING),
        (LANDLOCK, 9, "auto", "landlock", EVERYTHING - SHARED),
        (LANDLOCK, 1, "landlock", "landlock", EVERYTHING - SHARED),
        (
            replace(LANDLOCK, is_root=True),
            9,
            "auto",
            "landlock",
            EVERYTHING - SHARED_ROOT - {"identity", "gpus"},
        ),
        (
            replace(LANDLOCK, landlock_abi=5),
            9,
            "auto",
            "landlock",
            EVERYTHING - SHARED - {"signals", "abstract-sockets"},
        ),
        (LANDLOCK_ROOT, 9, "auto", "landlock", EVERYTHING - OWN),
        (
            replace(LANDLOCK_ROOT, landlock_abi=1),
            9,
            "auto",
            "landlock",
            EVERYTHING - OWN - {"abstract-sockets", "renames"},
        ),
        (LANDLOCK_ROOT, 9, "uid", "uid", EVERYTHING - OPEN),
        (ROOT, 9, "auto", "uid", EVERYTHING - OPEN),
        (
            CONTAINER,
            9,
            "auto",
            "uid",
            {
                "files",
                "platform",
                "signals",
                "modes",
                "sockets",
                "renames",
                "identity",
                "gpus",
                "out-of-memory",
                "network",
                "kernel",
            },
        ),
        (BARE, 1, "auto", "same-uid", {"renames", "gpus"}),
        (BARE, 0, "auto", "same-uid", {"renames", "gpus"}),
        (BOTH, 1, "same-uid", "same-uid", {"renames", "gpus"}),
        (BARE, 9, "none", "same-uid", {"renames", "gpus"}),
        (BOTH, 9, "none", "same-uid", {"renames", "gpus"}),
    ],
)
def test_decision(
    facts: MachineFacts, users: int, prefer: Preference, mechanism: str, protects: set[str]
) -> None:
    decision = decide(facts, users=users, gaps=gaps_of, prefer=prefer)

    assert decision.mechanism == mechanism
    assert set(decision.protects) == protects
    assert set(decision.broken) == EVERYTHING - protects


@pytest.mark.parametrize(
    ("facts", "users", "prefer", "words"),
    [
        (BARE, 2, "auto", "this home has 2 users"),
        (BARE, 2, "auto", "install the package bubblewrap"),
        (BARE, 2, "auto", "run the platform as root, with a spare uid"),
        (BARE, 2, "auto", "use Linux 5.13 or newer"),
        (WRAPPED, 1, "landlock", "the kernel does not offer Landlock"),
        (replace(BARE, landlock_abi=4, landlock_fault="no filter"), 1, "landlock", "no filter"),
        (replace(BARE, bubblewrap="/usr/bin/bwrap"), 2, "auto", "enable unprivileged user namespaces"),
        (replace(WRAPPED, bubblewrap_works=False, bubblewrap_fault="no mount"), 2, "auto", "no mount"),
        (
            replace(BARE, is_root=True, bubblewrap="/usr/bin/bwrap"),
            2,
            "auto",
            "as root it also needs setpriv",
        ),
        (replace(ROOT, uid_works=False, setpriv=None), 2, "auto", "install the package util-linux"),
        (replace(ROOT, uid_works=False, spare_uids=range(0)), 2, "auto", "no spare uid"),
        (replace(ROOT, uid_works=False, uid_fault="denied"), 2, "auto", "let other users reach /opt/python"),
        (
            replace(ROOT, uid_works=False, uid_fault="denied", python_blocked_at="/root"),
            2,
            "auto",
            "which needs /root: chmod o+x /root",
        ),
        (BOTH, 2, "same-uid", "this home has 2 users"),
        (BARE, 1, "bubblewrap", "install the package bubblewrap"),
        (WRAPPED, 1, "uid", "the platform is not root"),
    ],
)
def test_refusal_says_why_and_the_fix(
    facts: MachineFacts, users: int, prefer: Preference, words: str
) -> None:
    with pytest.raises(IsolationRefused) as refused:
        decide(facts, users=users, gaps=gaps_of, prefer=prefer)

    assert words in str(refused.value)
    assert all(fault.fix for fault in refused.value.faults)


@pytest.mark.parametrize(
    ("facts", "users", "statuses"),
    [
        (WRAPPED, 5, ["ok", "ok", "ok", "ok"]),
        (BOTH, 5, ["ok", "ok", "ok", "ok"]),
        (ROOT, 5, ["warn", "ok", "ok", "ok"]),
        (LANDLOCK, 5, ["warn", "ok", "ok", "ok"]),
        (BARE, 1, ["warn", "warn", "warn", "warn"]),
        (BARE, 2, ["fail", "warn", "warn", "warn"]),
    ],
)
def test_report_rows(facts: MachineFacts, users: int, statuses: list[str]) -> None:
    rows = report(facts, users=users, gaps=gaps_of)

    checks = ["isolation", "isolation.bubblewrap", "isolation.landlock", "isolation.uid"]
    found = [row for row in rows if row.check in checks]
    assert [(row.check, row.status) for row in found] == list(zip(checks, statuses, strict=True))
    assert all(row.fix for row in found if row.status != "ok")


def test_report_has_a_row_for_each_missing_protection() -> None:
    rows = {row.check: row.words for row in report(LANDLOCK, users=2, gaps=gaps_of)}

    assert {f"isolation.{promise}" for promise in SHARED} <= set(rows)
    assert (
        rows["isolation.tmp"]
        == "not kept: /tmp is closed to a job; TMPDIR names a folder in its own directory instead"
    )


def test_report_names_what_is_not_protected() -> None:
    [row, *_] = report(BARE, users=1, gaps=gaps_of)

    assert "nothing keeps user code apart" in row.words
    assert "Promises not kept: files, names, jobs" in row.words


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (WRAPPED, "the system's, /usr/bin/bwrap"),
        (
            replace(WRAPPED, bubblewrap="/venv/bwrap", bubblewrap_bundled=True),
            "installed with Falaj, /venv/bwrap",
        ),
    ],
)
def test_report_says_which_bubblewrap_is_used(facts: MachineFacts, words: str) -> None:
    [row, *_] = report(facts, users=2, gaps=gaps_of)

    assert words in row.words
