"""Explain a queued job where Kueue decides: what Kueue says, or why the job was not handed over to it."""

from __future__ import annotations

from collections.abc import Sequence

from falaj.records.scheduling.snapshot import Explanation, Reason, Request, Snapshot
from falaj.scheduling.capacity.resources import rank
from falaj.scheduling.decision.handover import HandoverRound
from falaj.scheduling.explanation.constraints import describe_reason
from falaj.scheduling.explanation.explain import share_of


def explain_handover(
    snapshot: Snapshot, handed_over: Sequence[Request], job: str, *, said: str | None, limit: int
) -> Explanation:
    """Return why a queued job waits; `said` is what is known of one that waits in Kueue, in `handed_over`."""
    in_kueue = {each.job: each for each in handed_over}
    waiting = sorted([*snapshot.pending, *handed_over], key=rank)
    request = next(each for each in waiting if each.job == job)
    handover = HandoverRound(snapshot, handed_over, limit=limit)
    share = share_of(request, handover.state)
    reason = Reason.KUEUE if job in in_kueue else handover.advance_to(job)
    if job in in_kueue:
        words = said or "it was handed over to Kueue, which has not answered yet"
    elif reason is None:
        words = "it is handed over to Kueue now"
    elif reason is Reason.KUEUE:
        words = (
            f"{handover.ahead(request)} jobs of queue {request.queue} with its priority or a higher one wait in Kueue, "
            f"the most at once (kubernetes.waiting_limit = {limit}); it is handed over when one of them starts"
        )
    else:
        words = f"it is not handed over to Kueue: {describe_reason(reason, request, handover.state, [])}"
    return Explanation(
        job=request.job,
        state="starting" if reason is None else "waiting",
        reason=reason,
        words=words,
        position=waiting.index(request) + 1,
        of=len(waiting),
        share=share,
    )
