"""The calls of workers: they fetch an attempt and report its log, its outputs and its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from falaj.control.jobs.agent_server import Answer, CallHandler
from falaj.errors import Conflict
from falaj.ports.launcher import WorkerHost
from falaj.training.runtime.errors import AgentRefused


class WorkerCalls:
    """Answers the workers of an attempt from `host`, and hands the calls of its ranks to `ranks`.

    `secrets` are read when a worker fetches the launch: they travel over TLS, and no disk and no object of the cluster
    holds them. `require_lease` raises Fenced if another controller is in charge.
    """

    def __init__(
        self,
        host: WorkerHost,
        ranks: CallHandler,
        *,
        secrets: Callable[[], Mapping[str, str]],
        require_lease: Callable[[], None],
    ) -> None:
        self._host, self._ranks = host, ranks
        self._secrets, self._require_lease = secrets, require_lease

    def answer(self, head: dict[str, Any], body: Iterator[bytes]) -> Answer:
        match head:
            case {"call": "files"}:
                listed = self._host.files()
                return None, len(listed), iter((listed,))
            case {"call": "fetch", "path": str(path), "offset": int(offset), "length": int(length)}:
                return None, *self._host.read_file(path, offset=offset, length=length)
            case {"call": str(call), "node_rank": int(node_rank), "pod": str(pod)}:
                try:
                    return self._answer_node(call, node_rank, pod, head, body), 0, iter(())
                except Conflict as error:
                    raise AgentRefused(error.message) from error
            case _:
                return self._ranks.answer(head, body)

    def _answer_node(
        self, call: str, node_rank: int, pod: str, head: dict[str, Any], body: Iterator[bytes]
    ) -> Any:
        host = self._host
        match head:
            case {"call": "claim"}:
                self._require_lease()
                host.claim(node_rank, pod)
                return {"now": time.time()}  # the worker's clock may be wrong
            case {"call": "launch"}:
                return {"launch": host.launch(node_rank, pod), "secrets": dict(self._secrets())}
            case {"call": "append_log", "offset": int(offset)}:
                return host.append_log(node_rank, pod, offset=offset, body=body)
            case {"call": "save_output", "path": str(path), "sha256": str(sha256), "body": int(size)}:
                host.save_output(node_rank, pod, path, size=size, sha256=sha256, body=body)
            case {"call": "save_packages"}:
                host.save_packages(node_rank, pod, body)
            case {"call": "renew"}:
                return asdict(host.renew(node_rank, pod))
            case {"call": "ended", "result": dict(result)}:
                host.end(node_rank, pod, result)
            case _:
                raise ValueError(f"unknown call {call!r}")
        return None
