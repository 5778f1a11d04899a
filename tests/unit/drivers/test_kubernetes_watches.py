"""Objects of a cluster kept current by a list and a watch: how that ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from falaj.drivers.kubernetes.watches import ObjectCache
from falaj.ports.cluster.manifests import ObjectKind
from polling import PATIENCE_S

NODE = ObjectKind("", "v1", "Node", "nodes")


class Listed(list[dict[str, Any]]):
    resourceVersion = "1"  # noqa: N815 - as lightkube calls it


class LateWatch:
    """A client whose watch begins only after all watches were ended for the first time."""

    def __init__(self) -> None:
        self.listing, self.told, self.watching, self.ended = (threading.Event() for _ in range(4))

    def list(self, *_: Any, **__: Any) -> Listed:
        self.listing.set()
        assert self.told.wait(PATIENCE_S)
        return Listed()

    def watch(self, *_: Any, **__: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        self.watching.set()
        assert self.ended.wait(PATIENCE_S)
        yield from ()

    def end_watches(self) -> None:
        self.told.set()
        if self.watching.is_set():
            self.ended.set()


def test_a_watch_that_begins_while_the_cache_is_closed_is_ended_too() -> None:
    client = LateWatch()
    cache: ObjectCache[dict[str, Any]] = ObjectCache(client, NODE, dict)  # type: ignore[arg-type]
    assert cache.known() is None
    assert client.listing.wait(PATIENCE_S)

    cache.close()

    assert cache._thread is not None
    assert not cache._thread.is_alive()
