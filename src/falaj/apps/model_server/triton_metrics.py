"""The server's counts under the names of Triton Inference Server, so that its dashboards and alerts work unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields

from falaj.serving.deployment_state import ServedEndpoint
from falaj.serving.runtime.batch_queue import BatchQueue
from falaj.serving.runtime.metering import MeteredEngine

OK = 200


@dataclass
class ModelTotals:
    """Counts of one model version since it was loaded, over all endpoints that route to it."""

    request_success: int = 0
    request_failure: int = 0
    count: int = 0
    exec_count: int = 0
    request_duration_us: int = 0
    queue_duration_us: int = 0
    compute_infer_duration_us: int = 0
    pending_request_count: int = 0


DESCRIPTIONS = {
    "request_success": "Number of successful inference requests",
    "request_failure": "Number of failed inference requests",
    "count": "Number of inferences performed (rows)",
    "exec_count": "Number of model executions performed (batches)",
    "request_duration_us": "Cumulative inference request duration in microseconds",
    "queue_duration_us": "Cumulative inference queuing duration in microseconds",
    "compute_infer_duration_us": "Cumulative model execution duration in microseconds",
    "pending_request_count": "Number of requests that wait for execution",
}
GAUGES = frozenset({"pending_request_count"})


def model_totals(
    served: Mapping[str, ServedEndpoint],
    counted: Callable[[str, str], tuple[Mapping[int, int], float]],
    meter_of: Callable[[BatchQueue], MeteredEngine | None],
) -> dict[tuple[str, str], ModelTotals]:
    """Return the totals by model and version; `counted` has statuses and seconds of a version of an endpoint."""
    found: dict[tuple[str, str], ModelTotals] = {}
    for name, endpoint in served.items():
        for version, queue in endpoint.queues.items():
            key = queue.model.name, queue.model.version
            if key not in found:
                found[key] = _of_queue(queue, meter_of(queue))
            statuses, seconds = counted(name, version)
            good = statuses.get(OK, 0)
            found[key].request_success += good
            found[key].request_failure += sum(statuses.values()) - good
            found[key].request_duration_us += int(seconds * 1e6)
    return found


def _of_queue(queue: BatchQueue, meter: MeteredEngine | None) -> ModelTotals:
    return ModelTotals(
        count=queue.rows,
        exec_count=queue.batches,
        queue_duration_us=int(queue.queued_s * 1e6),
        compute_infer_duration_us=0 if meter is None else meter.run_ns // 1000,
        pending_request_count=queue.waiting,
    )


def render(found: Mapping[tuple[str, str], ModelTotals], *, replica: str) -> bytes:
    """Return the totals in the text format of Prometheus."""
    return "".join(_lines(found, replica)).encode()


def _lines(found: Mapping[tuple[str, str], ModelTotals], replica: str) -> Iterable[str]:
    for field in fields(ModelTotals):
        name = f"nv_inference_{field.name}"
        kind = "gauge" if field.name in GAUGES else "counter"
        yield f"# HELP {name} {DESCRIPTIONS[field.name]}\n# TYPE {name} {kind}\n"
        for (model, version), totals in found.items():
            labels = f'model="{_escaped(model)}",version="{_escaped(version)}",replica="{_escaped(replica)}"'
            yield f"{name}{{{labels}}} {getattr(totals, field.name)}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
