"""Ctrl-C during a group commit of the audit log: no thread waits forever, and nothing acknowledged is lost."""

from __future__ import annotations

import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from falaj.errors import FalajError, Unavailable
from falaj.governance.audit import log
from falaj.governance.audit.log import Draft, _Group
from platforms import OwnPlatform
from polling import PATIENCE_S, eventually


class FakeLog:
    """Commits the drafts of a group; a commit waits while the book is `closed`."""

    def __init__(self) -> None:
        self.committed: list[str] = []
        self.opened = threading.Event()
        self.opened.set()
        self.writing = threading.Event()
        self.on_commit: Callable[[Sequence[Draft]], None] | None = None

    def commit(self, drafts: Sequence[Draft]) -> None:
        self.writing.set()
        assert self.opened.wait(PATIENCE_S)
        if self.on_commit is not None:
            self.on_commit(drafts)
        self.committed += [draft["name"] for draft in drafts]


class SubmittingThreads:
    """Threads that submit, and the entries acknowledged to them."""

    def __init__(self, group: _Group) -> None:
        self._group = group
        self._threads: list[threading.Thread] = []
        self.acknowledged: list[str] = []
        self.refused: list[BaseException] = []

    def come(self, name: str) -> None:
        thread = threading.Thread(target=self.submit, args=(name,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def submit(self, name: str) -> None:
        try:
            self._group.submit({"name": name})
        except FalajError as error:
            self.refused.append(error)
        else:
            self.acknowledged.append(name)

    def leave(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert not [thread for thread in self._threads if thread.is_alive()], "somebody waits forever"


@contextmanager
def interrupted_at(moment: int) -> Iterator[list[str]]:
    """Raise Ctrl-C at the `moment`th call or return in the group commit, where Python permits it; return that place."""
    seen, places = 0, []

    def watch(frame: Any, event: str, _arg: Any) -> None:
        nonlocal seen
        if frame.f_code.co_filename != log.__file__ or event == "c_call":
            return
        seen += 1
        if seen == moment:
            places.append(f"{frame.f_code.co_name}:{frame.f_lineno} {event}")
            raise KeyboardInterrupt

    sys.setprofile(watch)
    try:
        yield places
    finally:
        sys.setprofile(None)


def submit_interrupted(crowd: SubmittingThreads, moment: int) -> list[str]:
    with interrupted_at(moment) as places, suppress(KeyboardInterrupt):
        crowd.submit("mine")
    return places


def check(book: FakeLog, crowd: SubmittingThreads) -> None:
    written = Counter(book.committed)
    assert set(crowd.acknowledged) <= set(written)
    assert max(written.values()) == 1, written


def test_ctrl_c_while_leading_leaves_no_thread_waiting() -> None:
    moment, places = 0, ["not yet"]
    while places:
        moment += 1
        book = FakeLog()
        group = _Group(book.commit)
        crowd = SubmittingThreads(group)

        def join_in(
            _: Any, book: FakeLog = book, group: _Group = group, crowd: SubmittingThreads = crowd
        ) -> None:
            book.on_commit = None
            crowd.come("meanwhile")
            eventually(lambda: group._waiting, every=0)

        book.on_commit = join_in  # another thread arrives during the commit, and leads after us

        places = submit_interrupted(crowd, moment)
        crowd.come("later")
        crowd.leave()

        assert "later" in crowd.acknowledged, places
        check(book, crowd)
    assert moment > 10
    assert sorted(book.committed) == ["later", "meanwhile", "mine"]


def test_ctrl_c_while_following_leaves_no_thread_waiting() -> None:
    moment, places = 0, ["not yet"]
    while places:
        moment += 1
        book = FakeLog()
        group = _Group(book.commit)
        crowd = SubmittingThreads(group)
        book.opened.clear()
        crowd.come("leader")
        assert book.writing.wait(PATIENCE_S)
        threading.Timer(0.001, book.opened.set).start()

        places = submit_interrupted(crowd, moment)  # we wait for the leader, and lead after it
        crowd.come("later")
        crowd.leave()

        assert {"leader", "later"} <= set(crowd.acknowledged), places
        check(book, crowd)
    assert moment > 10
    assert sorted(book.committed) == ["later", "leader", "mine"]


def test_members_of_an_interrupted_group_commit_get_a_falaj_error() -> None:
    book = FakeLog()
    group = _Group(book.commit)
    crowd = SubmittingThreads(group)
    book.opened.clear()
    crowd.come("leader")
    assert book.writing.wait(PATIENCE_S)
    for name in ("second", "third"):  # they are committed together, by one of them
        crowd.come(name)
    eventually(lambda: len(group._waiting) == 2)

    def interrupt(drafts: Sequence[Draft]) -> None:
        if len(drafts) == 2:
            raise KeyboardInterrupt

    book.on_commit = interrupt
    book.opened.set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda _: None)
        crowd.leave()
    crowd.submit("later")

    assert crowd.acknowledged == book.committed == ["leader", "later"]
    assert [type(error) for error in crowd.refused] == [Unavailable]


@pytest.mark.parametrize("leads", [False, True])
def test_a_real_ctrl_c_interrupts_the_main_thread_only(light_platform: OwnPlatform, leads: bool) -> None:
    audit, acknowledged, book = light_platform.parts.audit, [], FakeLog()
    book.opened.clear()
    commit = audit._group._commit
    audit._group._commit = lambda drafts: (book.commit([{"name": "x"}]), commit(drafts))

    def append(name: str) -> None:
        draft = {"at": light_platform.clock(), "caller": name, "action": "users.whoami", "outcome": "done"}
        audit.append_grouped(draft | {"workspace": None})
        acknowledged.append(name)

    def press() -> None:
        assert book.writing.wait(PATIENCE_S)
        if leads:
            other.start()
        eventually(lambda: len(audit._group._waiting) == 1)
        press_ctrl_c(until=felt)

    other, finger = threading.Thread(target=append, args=("other",)), threading.Thread(target=press)
    if not leads:
        other.start()
        assert book.writing.wait(PATIENCE_S)
    with first_ctrl_c_only() as felt:
        finger.start()
        with pytest.raises(KeyboardInterrupt):
            append("mine")
        book.opened.set()
        for thread in (other, finger):
            thread.join(PATIENCE_S)
    append("later")

    written = [entry["caller"] for entry in light_platform.entries()]
    assert acknowledged == ["other", "later"]
    assert written[-2:] == ["other", "later"]
    assert light_platform.verify_audit().problems == ()


@contextmanager
def first_ctrl_c_only() -> Iterator[threading.Event]:
    """Let the main thread receive only the first Ctrl-C; the event is set when it did."""
    felt = threading.Event()

    def feel(*_: object) -> None:
        if not felt.is_set():
            felt.set()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, feel)
    try:
        yield felt
    finally:
        signal.signal(signal.SIGINT, before)


def press_ctrl_c(*, until: threading.Event) -> None:
    """Send it repeatedly: a signal just before a thread begins to wait is lost."""
    while not until.wait(0.01):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
