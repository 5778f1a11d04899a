"""Pages are refreshed by notices: seldom, while they are seen; what is sampled is asked for once for all who look."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from nicegui import core, helpers

from falaj.apps.console import page, sampling
from falaj.apps.console.application import remember_signatures
from falaj.apps.console.live import Handler
from falaj.apps.console.page import PageContext
from falaj.apps.console.sampling import sample_together
from falaj.errors import Denied, FalajError
from polling import eventually_async


class Feed:
    """Hands notices to pages as `LiveFeed` does."""

    def __init__(self) -> None:
        self.listening: dict[object, tuple[tuple[str, ...], tuple[str, ...], Handler]] = {}

    def listen(
        self, _workspace: str, patterns: tuple[str, ...], handle: Handler, *, objects: tuple[str, ...] = ()
    ) -> Callable[[], None]:
        key = object()
        self.listening[key] = (patterns, objects, handle)
        return lambda: self.listening.pop(key, None) and None

    def change(self) -> None:
        for _, _, handle in [*self.listening.values()]:
            handle(None)

    @property
    def followed(self) -> list[tuple[str, ...]]:
        return [objects for _, objects, _ in self.listening.values()]


class Client:
    """An open page of a browser."""

    def __init__(self) -> None:
        self.is_deleted = False
        self._closing: list[Callable[[], None]] = []

    def on_delete(self, handle: Callable[[], None]) -> None:
        self._closing.append(handle)

    def delete(self) -> None:
        self.is_deleted = True
        for handle in self._closing:
            handle()


class Context(PageContext):
    """A page that asks nobody: `answers` says what an operation returns."""

    answers: Callable[[], Any]

    async def ask(self, call: Callable[[Any], Any]) -> Any:
        await asyncio.sleep(0)
        return call(self.answers())


def opened(feed: Feed | None = None, answers: Callable[[], Any] = lambda: None) -> Context:
    request = SimpleNamespace(path_params={"workspace": "default"})
    made: Any = Context(
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        feed or Feed(),  # type: ignore[arg-type]
        Client(),  # type: ignore[arg-type]
        request,  # type: ignore[arg-type]
        lambda _session: None,
    )
    made.answers = answers
    return made  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "SOON_S", 0.001)


def in_loop(test: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        core.loop = asyncio.get_running_loop()
        try:
            await test()
        finally:
            core.loop = None

    asyncio.run(run())


def test_many_notices_refresh_a_page_once_and_then_not_for_a_while() -> None:
    feed, times = Feed(), list[float]()

    async def refresh() -> None:
        times.append(asyncio.get_running_loop().time())

    async def test() -> None:
        opened(feed).live(refresh, events=("runs.*",), gather_s=0.1)
        for _ in range(50):
            feed.change()
        await eventually_async(lambda: len(times) == 1)
        for count in (2, 3):
            feed.change()
            await eventually_async(lambda count=count: len(times) == count)  # type: ignore[misc]

    in_loop(test)

    assert min(later - earlier for earlier, later in pairwise(times)) > 0.09


def test_a_page_that_nobody_sees_is_refreshed_once_it_is_seen_again() -> None:
    feed, refreshed, beside = Feed(), list[str](), list[str]()

    async def refresh() -> None:
        refreshed.append("now")

    async def refresh_beside() -> None:
        beside.append("now")

    async def test() -> None:
        context, other = opened(feed), opened(other_feed := Feed())
        context.live(refresh, events=("runs.*",), gather_s=0)
        other.live(refresh_beside, events=("runs.*",), gather_s=0)
        context.set_visible(False)
        feed.change()
        other_feed.change()
        await eventually_async(lambda: beside)  # what was told later was shown
        assert refreshed == []
        context.set_visible(True)
        await eventually_async(lambda: refreshed)
        context.set_visible(True)
        other_feed.change()
        await eventually_async(lambda: len(beside) == 2)

    in_loop(test)

    assert refreshed == ["now"]


def test_a_page_follows_other_objects_once_it_shows_them_and_none_when_it_is_closed() -> None:
    feed, shown = Feed(), ["run_1"]

    async def refresh() -> None:
        shown.append("run_2")

    async def test() -> None:
        context = opened(feed)
        context.live(refresh, events=("runs.*",), objects=lambda: shown, gather_s=0)
        assert feed.followed == [("run_1",)]
        feed.change()
        await eventually_async(lambda: feed.followed == [("run_1", "run_2")])
        context.client.delete()

    in_loop(test)

    assert feed.followed == []


def test_a_refresh_that_fails_is_tried_again_at_the_next_notice() -> None:
    feed, tried = Feed(), list[str]()

    async def refresh() -> None:
        tried.append("now")
        raise FalajError("busy")

    async def test() -> None:
        opened(feed).live(refresh, events=("*",), gather_s=0)
        for count in (1, 2):
            feed.change()
            await eventually_async(lambda count=count: len(tried) == count)  # type: ignore[misc]

    in_loop(test)


# ---------------------------------------------------------------------------------------------- samples


def test_twenty_pages_share_one_question_and_none_is_asked_unseen_or_closed() -> None:
    asked, taken, others = list[int](), list[tuple[int, int]](), list[int]()

    def answer() -> int:
        asked.append(1)
        return len(asked)

    async def test() -> None:
        pages = [opened(answers=answer) for _ in range(20)]
        for number, each in enumerate(pages):
            sample_together(
                each,
                "load",
                lambda found: found,
                lambda found, at=number: taken.append((at, found)),
                every_s=0.01,
            )
        await eventually_async(lambda: len(asked) >= 23)  # each once itself, then one for all
        assert {at for at, found in taken if found == 22} == {*range(20)}
        assert len(sampling._samplers) == 1
        for each in pages:
            each.set_visible(False)
        beside = opened(answers=lambda: len(others))
        sample_together(beside, "other", lambda found: found, others.append, every_s=0.01)
        await eventually_async(lambda: len(others) >= 3)  # what was asked before is over
        before = len(asked)
        await eventually_async(lambda: len(others) >= 8)
        assert len(asked) == before
        beside.client.delete()
        for each in pages:
            each.client.delete()
        await eventually_async(lambda: not sampling._samplers)

    in_loop(test)


def test_who_may_no_longer_ask_gets_no_sample_of_others() -> None:
    taken: dict[str, int] = {"allowed": 0, "refused": 0}

    def refused() -> int:
        raise Denied("no")

    def take(name: str) -> Callable[[int], None]:
        def count(_found: int) -> None:
            taken[name] += 1

        return count

    async def test() -> None:
        allowed, other = opened(answers=lambda: 1), opened(answers=refused)
        sample_together(other, "load", lambda found: found, take("refused"), every_s=0.001)
        sample_together(allowed, "load", lambda found: found, take("allowed"), every_s=0.001)
        await eventually_async(lambda: taken["allowed"] > 10)
        allowed.client.delete()
        await eventually_async(lambda: not sampling._samplers)

    in_loop(test)

    assert taken["refused"] == 0


# ------------------------------------------------------------------------------------------- the framework


def test_remembered_signatures_are_those_that_the_framework_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Handlers:
        def bare(self) -> None: ...

        def takes(self, event: object) -> None: ...

    def made(default: int) -> Callable[..., None]:
        return lambda event=default: None

    one = Handlers()
    functions = [
        one.bare,
        Handlers.bare,
        one.takes,
        made(1),
        made(2),
        print,
        Handlers,
        partial(Handlers.takes, one),
    ]
    found = [helpers.expects_arguments(each) for each in functions]
    monkeypatch.setattr(helpers, "expects_arguments", helpers.expects_arguments)

    remember_signatures()

    for _ in range(2):
        assert [helpers.expects_arguments(each) for each in functions] == found
    assert found[:4] == [False, True, True, False]
