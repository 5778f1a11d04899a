"""What a job's earlier attempts have left in its runs: the losses that they logged, and where they went on."""

from __future__ import annotations

from contextlib import suppress

from falaj.errors import Denied, NotFound
from falaj.records.names import ObjectId
from falaj.tracking.service import Runs
from falaj.training.runs import CONTINUES_RUN
from falaj.training.runtime.agent.agents import RESUME_PREFIX
from falaj.training.runtime.agent.protocol import LOSS_FORMAT

MOST_LOSSES = 100_000
"""The first ones after a step: those between two checkpoints, many times over."""
MOST_RESUMES = 5_000
MOST_RUNS = 100
"""So many runs of a job are looked at, the newest ones; one begins with each retry."""


def read_run_history(runs: Runs, run: ObjectId, *, after: int) -> tuple[list[str], bytes]:
    """What the runtime's `recall` asks for, as it goes over the wire. Who may not read the losses gets none."""
    params = _params(runs, run)
    resumes = [value for key, value in params.items() if key.startswith(RESUME_PREFIX)]
    packed = bytearray()
    for each in reversed(_chain(runs, run, params)):
        with suppress(Denied, NotFound):  # whoever retried the job may not see how it went for another
            _pack_losses(runs, each, after, packed)
    return resumes[:MOST_RESUMES], bytes(packed)


def _chain(runs: Runs, run: str, params: dict[str, str]) -> list[str]:
    """The run, and those that it goes on from as far as they can be seen, the newest first."""
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
