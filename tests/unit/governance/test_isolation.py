"""The decision how user code is started, as a table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from falaj.errors import IsolationRefused
from falaj.governance.isolation import Preference, decide, report
from falaj.ports.sandbox import MachineFacts

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

EVERYTHING = {"files", "jobs", "platform", "writes", "network", "children"}
CONTAINER = replace(ROOT, unshare=None, spare_uids=range(65534, 65535))


@pytest.mark.parametrize(
    ("facts", "users", "prefer", "mechanism", "protects"),
    [
        (WRAPPED, 1, "auto", "bubblewrap", EVERYTHING),
        (WRAPPED, 9, "auto", "bubblewrap", EVERYTHING),
        (BOTH, 9, "auto", "bubblewrap", EVERYTHING),
        (BOTH, 9, "uid", "uid", EVERYTHING - {"writes"}),
        (ROOT, 9, "auto", "uid", EVERYTHING - {"writes"}),
        (CONTAINER, 9, "auto", "uid", {"files", "platform"}),
        (BARE, 1, "auto", "same-uid", set()),
        (BARE, 0, "auto", "same-uid", set()),
        (BOTH, 1, "same-uid", "same-uid", set()),
    ],
)
def test_decision(
    facts: MachineFacts, users: int, prefer: Preference, mechanism: str, protects: set[str]
) -> None:
    decision = decide(facts, users=users, prefer=prefer)

    assert decision.mechanism == mechanism
    assert set(decision.protects) == protects
    assert set(decision.exposes) == EVERYTHING - protects


@pytest.mark.parametrize(
    ("facts", "users", "prefer", "words"),
    [
        (BARE, 2, "auto", "this home has 2 users"),
        (BARE, 2, "auto", "install the package bubblewrap"),
        (BARE, 2, "auto", "run the platform as root, with a spare uid"),
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
        (BOTH, 2, "same-uid", "this home has 2 users"),
        (BARE, 1, "bubblewrap", "install the package bubblewrap"),
        (WRAPPED, 1, "uid", "the platform is not root"),
    ],
)
def test_refusal_says_why_and_the_fix(
    facts: MachineFacts, users: int, prefer: Preference, words: str
) -> None:
    with pytest.raises(IsolationRefused) as refused:
        decide(facts, users=users, prefer=prefer)

    assert words in str(refused.value)
    assert all(fault.fix for fault in refused.value.faults)


@pytest.mark.parametrize(
    ("facts", "users", "statuses"),
    [
        (WRAPPED, 5, ["ok", "ok", "ok"]),
        (BOTH, 5, ["ok", "ok", "ok"]),
        (ROOT, 5, ["warn", "ok", "ok"]),
        (BARE, 1, ["warn", "warn", "warn"]),
        (BARE, 2, ["fail", "warn", "warn"]),
    ],
)
def test_report_rows(facts: MachineFacts, users: int, statuses: list[str]) -> None:
    rows = report(facts, users=users)

    assert [row.check for row in rows] == ["isolation", "isolation.bubblewrap", "isolation.uid"]
    assert [row.status for row in rows] == statuses
    assert all(row.fix for row in rows if row.status != "ok")


def test_report_says_what_is_not_protected() -> None:
    [row, *_] = report(BARE, users=1)

    assert "nothing keeps user code apart" in row.words
    assert "keys, database" in row.words
    assert "the network" in row.words


def test_report_says_when_the_network_stays_open() -> None:
    [row, *_] = report(CONTAINER, users=2)

    assert "Not protected: the files and processes of other jobs" in row.words
    assert "the network, unless" in row.words
