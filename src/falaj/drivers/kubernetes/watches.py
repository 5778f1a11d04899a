"""Objects of the cluster kept current in memory by one list and one watch."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from lightkube import ALL_NS

from falaj.drivers.kubernetes.client import ClusterClient, resource_of, translate
from falaj.errors import FalajError, Unavailable
from falaj.ports.cluster.manifests import ObjectKind

log = logging.getLogger("falaj.drivers.kubernetes")

T = TypeVar("T")

WATCH_S = 240
"""The server ends each watch after this time; the next one goes on where it ended."""
FIRST_LIST_S = 30.0
SHORTEST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 15.0
CLOSE_S, JOIN_S = 5.0, 0.05
CHUNK = 500


class ObjectCache(Generic[T]):
    """The objects of a kind, converted, by namespace and name.

    One thread lists them, then watches from the version of the list. Whatever ends the watch (the API server has
    restarted, the version is too old, credentials have expired), it lists again, after a pause that grows while that
    fails. Until then the objects are those last known, and `fault` says what is wrong.
    """

    def __init__(
        self,
        client: ClusterClient,
        kind: ObjectKind,
        convert: Callable[[dict[str, Any]], T],
        *,
        labels: dict[str, Any] | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._client, self._resource, self._convert = client, resource_of(kind), convert
        self._labels, self._on_change = labels, on_change
        self._kind = kind.kind
        self._everywhere: dict[str, Any] = {"namespace": ALL_NS} if kind.namespaced else {}
        self._lock = threading.Lock()
        self._objects: dict[tuple[str, str], T] = {}
        self._fault: FalajError | None = None
        self._listed = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.lists = 0

    @property
    def fault(self) -> FalajError | None:
        """Return why the objects are not current; none if they are."""
        return self._fault

    def objects(self) -> dict[tuple[str, str], T]:
        """Return the objects by namespace and name. Raise Unavailable if they could not be listed even once."""
        self._start()
        if not self._listed.wait(FIRST_LIST_S) or self.lists == 0:
            raise self._fault or Unavailable(f"the cluster has not listed its objects of kind {self._kind}")
        with self._lock:
            return dict(self._objects)

    def known(self) -> dict[tuple[str, str], T] | None:
        """Return the objects as last known, without waiting; none before they were listed for the first time."""
        self._start()
        with self._lock:
            return dict(self._objects) if self.lists else None

    def close(self) -> None:
        """End the watch and its thread. Other watches of the client are ended too, and begin again."""
        self._closing.set()
        until = time.monotonic() + CLOSE_S
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < until:
            self._client.end_watches()  # also one that has begun only now
            self._thread.join(JOIN_S)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"watch {self._kind}", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        pause_s = SHORTEST_PAUSE_S
        while not self._closing.is_set():
            try:
                self._watch(self._list())
            except Exception as error:  # whatever it is, the next list repairs it
                if self._closing.is_set():
                    return
                if self._fault is None:  # the last list worked
                    pause_s = SHORTEST_PAUSE_S
                self._fail(error)
                self._closing.wait(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - spreads requests
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    def _fail(self, error: Exception) -> None:
        found = translate(error, f"list and watch {self._kind}")
        if self._fault is None or self._fault.message != found.message:
            log.warning("objects of the cluster are not current", extra={"reason": found.message})
        self._fault = found
        self._listed.set()  # who waits for the first list is told why there is none

    def _list(self) -> str:
        """Replace all objects by a fresh list, and return its version."""
        found = self._client.list(self._resource, chunk_size=CHUNK, labels=self._labels, **self._everywhere)
        fresh = {_key(each): self._convert(each) for each in found}
        with self._lock:
            changed = fresh != self._objects
            self._objects = fresh
            self.lists += 1
        self._fault = None
        self._listed.set()
        if changed:
            self._on_change()
        return found.resourceVersion

    def _watch(self, version: str) -> None:
        changes = self._client.watch(
            self._resource,
            labels=self._labels,
            resource_version=version,
            server_timeout=WATCH_S,
            **self._everywhere,
        )
        for event, each in changes:
            if self._closing.is_set():
                return
            if event != "BOOKMARK":
                self._take(event, each)

    def _take(self, event: str, each: dict[str, Any]) -> None:
        key = _key(each)
        new = None if event == "DELETED" else self._convert(each)
        with self._lock:
            before = self._objects.get(key)
            if new is None:
                self._objects.pop(key, None)
            else:
                self._objects[key] = new
        if new != before:
            self._on_change()


def _key(each: dict[str, Any]) -> tuple[str, str]:
    metadata = each["metadata"]
    return metadata.get("namespace", ""), metadata["name"]
