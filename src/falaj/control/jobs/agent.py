"""The agent of a running attempt: the calls by which its processes use the platform's operations.

They come from user code: each is checked, and every effect is an operation on behalf of the job's owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from falaj.control.authorization import acting
from falaj.control.jobs.checkpoints import CheckpointUploads
from falaj.control.jobs.storage_limits import StorageLimits
from falaj.control.services import Services
from falaj.errors import Denied, NotFound
from falaj.governance.blobs.direct import UploadGrant
from falaj.governance.encryption.frames import PLAIN_BYTES
from falaj.governance.operations.caller import Caller
from falaj.records.names import ObjectId
from falaj.records.tracking import BATCH_POINTS, MetricPoint
from falaj.tracking.service import Runs
from falaj.training.runs import CONTINUES_RUN
from falaj.training.runtime.agent.agents import RESUME_PREFIX
from falaj.training.runtime.agent.protocol import LOSS_FORMAT
from falaj.training.runtime.checkpointing.storage.store import MAX_PARTS, SaveId
from falaj.training.store import JobRow

MOST_LOSSES = 100_000
"""At most so many losses are returned, the first ones after a step."""
MOST_RESUMES = 5_000
MOST_RUNS = 100
"""At most so many runs of a job are read, the newest ones; each retry starts one."""


class PlatformAgent:
    """Handles the calls of an attempt on behalf of the job's owner."""

    def __init__(
        self,
        services: Services,
        row: JobRow,
        *,
        workspace: ObjectId,
        owner: Callable[[], Caller],
        service: Caller,
        fence: int,
        may_continue: Callable[[], bool],
        on_progress: Callable[[int, int], None],
        on_metrics: Callable[[Sequence[MetricPoint]], None] = lambda _points: None,
        limits: StorageLimits | None = None,
        zone: Callable[[], str | None] = lambda: None,
        is_store_open: bool = False,
    ) -> None:
        """`owner` is called for each operation, and raises if they may no longer act; `zone` is that of checkpoints.

        `is_store_open`: the machines of the attempt may reach the object store.
        """
        self._services, self._row, self._workspace = services, row, workspace
        self._owner, self._service, self._fence = owner, service, fence
        self._may_continue, self._on_progress, self._on_metrics = may_continue, on_progress, on_metrics
        self._checkpoints = CheckpointUploads(
            services,
            row.id,
            row.attempt,
            workspace=workspace,
            owner=owner,
            service=service,
            fence=fence,
            limits=limits or StorageLimits(),
            zone=zone,
            is_store_open=is_store_open,
        )

    def close(self) -> None:
        """Give up what the attempt has left unfinished."""
        self._checkpoints.close()

    def answer(self, head: dict[str, Any], body: Iterator[bytes]) -> tuple[Any, int, Iterator[bytes]]:
        """Return the result of a call, and the size and the bytes of the body that follows it."""
        match head:
            case {"call": "log", "metrics": list(metrics)}:
                self._log(metrics, head.get("id"))
            case {"call": "params", "params": dict(params)}:
                self._log_params(params)
            case {"call": "recall", "after": int(after)}:
                with acting(self._owner(), fence=self._fence):
                    resumes, losses = read_run_history(
                        self._services.runs, self._row.run, after=_count(after)
                    )
                return resumes, len(losses), iter((losses,))
            case {"call": "progress", "step": int(step), "total": int(total)}:
                self._on_progress(_count(step), _count(total))
            case {"call": "heartbeat"}:
                return self._may_continue(), 0, iter(())
            case {"call": "say", "words": str()}:
                pass  # its output is its log
            case {"call": "checkpoint_steps"}:
                return self._checkpoints.steps(), 0, iter(())
            case {"call": "save_part", "step": int(step), "save": str(save), "number": int(number)}:
                self._checkpoints.save_part(SaveId(step, save), number, body, size=head["body"])
            case {"call": "grant_part", "step": int(step), "save": str(save), "number": int(number)}:
                grant = self._checkpoints.grant_part(SaveId(step, save), number, size=int(head["size"]))
                return _spell_grant(grant), 0, iter(())
            case {"call": "confirm_part", "step": int(step), "save": str(save), "number": int(number)}:
                named = {"blob": str(head["blob"]), "sha256": str(head["sha256"])}
                self._checkpoints.confirm_part(SaveId(step, save), number, **named)
            case {"call": "commit_checkpoint", "step": int(step), "save": str(save), "keep": int(keep)}:
                best = None if head.get("best") is None else int(head["best"])
                sizes, size = _sizes(head), head["body"]
                self._checkpoints.commit(SaveId(step, save), sizes, body, size=size, keep=keep, best=best)
            case {"call": "load_manifest", "step": int(step)}:
                return None, *self._checkpoints.load_manifest(step)
            case {"call": "load_part", "step": int(step), "number": int(number)}:
                where = {"offset": int(head["offset"]), "length": int(head["length"])}
                return None, *self._checkpoints.load_part(step, number, **where)
            case _:
                raise ValueError(f"unknown call {head.get('call')!r}")
        return None, 0, iter(())

    def _log(self, metrics: list[Any], batch: Any) -> None:
        if len(metrics) > BATCH_POINTS:
            raise ValueError(f"{len(metrics)} metrics at once; at most {BATCH_POINTS}")
        points = tuple(
            MetricPoint(key=str(name), value=float(value), step=int(step)) for step, name, value in metrics
        )
        if points:
            named = f"{self._row.id}.{batch}"[:100] if isinstance(batch, str) else None
            with acting(self._owner(), fence=self._fence):
                self._services.runs.log_metrics(self._row.run, points, batch=named)
            self._on_metrics(points)

    def _log_params(self, params: dict[str, Any]) -> None:
        with acting(self._owner(), fence=self._fence):
            known = {each.key for each in self._services.runs.show(self._row.run).params}
            new = {key: value for key, value in params.items() if key not in known}
            if new:
                self._services.runs.log_params(self._row.run, new)


def _spell_grant(grant: UploadGrant | None) -> dict[str, Any] | None:
    """Return a grant as JSON. It has a key: it is sent to the process that asked, and written nowhere."""
    if grant is None:
        return None
    header, bound, key = (each.hex() for each in grant.sealing)
    return {
        "blob": grant.ident,
        "url": grant.address.url,
        "header": header,
        "bound": bound,
        "key": key,
        "frame_bytes": PLAIN_BYTES,
    }


def _sizes(head: dict[str, Any]) -> list[int]:
    found = head.get("sizes")
    if not isinstance(found, list) or not all(type(each) is int and 0 <= each < 1 << 62 for each in found):
        raise ValueError(f"`sizes` must be a list of at most {MAX_PARTS} sizes in bytes")
    return found


def _count(number: int) -> int:
    if not 0 <= number < 1 << 62:
        raise ValueError("a step must be at least 0 and fit into 62 bits")
    return number


# ------------------------------------------------------------------------------------------ run history


def read_run_history(runs: Runs, run: ObjectId, *, after: int) -> tuple[list[str], bytes]:
    """Return the resumes of a job and the losses of its runs after a step, packed for the runtime's call `recall`.

    Runs that the caller may not read are left out.
    """
    params = _params(runs, run)
    resumes = [value for key, value in params.items() if key.startswith(RESUME_PREFIX)]
    packed = bytearray()
    for each in reversed(_chain(runs, run, params)):
        with suppress(Denied, NotFound):  # the user who retried the job may not read runs of others
            _pack_losses(runs, each, after, packed)
    return resumes[:MOST_RESUMES], bytes(packed)


def _chain(runs: Runs, run: str, params: dict[str, str]) -> list[str]:
    """Return the run and those that it continues, as far as they are visible, newest first."""
    found = [run]
    with suppress(Denied, NotFound):
        while (before := params.get(CONTINUES_RUN)) and before not in found and len(found) < MOST_RUNS:
            params = _params(runs, before)
            found.append(before)
    return found


def _params(runs: Runs, run: str) -> dict[str, str]:
    return {each.key: each.value for each in runs.show(run).params}


def _pack_losses(runs: Runs, run: str, after: int, packed: bytearray) -> None:
    for batch in runs.metrics(run, "loss", from_step=after + 1):
        steps, values = (batch.column(name).to_pylist() for name in ("step", "value"))
        for each in zip(steps, values, strict=True):
            if len(packed) >= MOST_LOSSES * LOSS_FORMAT.size:
                return
            packed += LOSS_FORMAT.pack(*each)
