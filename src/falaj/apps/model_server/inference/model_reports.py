"""What Triton's extensions of the protocol ask about models: configuration, statistics and the repository index."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from falaj.apps.model_server.metrics import ServerMetrics, VersionMetrics
from falaj.errors import Conflict, InvalidInput, shorten
from falaj.records.serving.tensors import Datatype, Tensor
from falaj.serving.deployment_state import ServedEndpoint
from falaj.serving.runtime.batch_queue import BatchQueue
from falaj.serving.runtime.metering import statistics_of
from falaj.serving.runtime.run_statistics import RunTotals

PLATFORM, BACKEND = "onnxruntime_onnx", "onnxruntime"
"""What Triton calls the engine of ONNX models."""

Report = dict[str, Any]


class IndexRequest(msgspec.Struct):
    ready: bool = False


class RepositoryLoad(msgspec.Struct):
    parameters: dict[str, msgspec.Raw] | None = None


# ------------------------------------------------------------------------------------- configuration


def describe_config(
    name: str, queue: BatchQueue, request: Sequence[Tensor], *, version: str | None
) -> Report:
    """Return the configuration of a model as Triton writes it; `request` are the inputs of a feature lookup."""
    batches = queue.engine.cost.rows > 1 and not request
    model = queue.model
    return {
        "name": name,
        "platform": PLATFORM,
        "backend": BACKEND,
        "version_policy": {"specific": {"versions": [version]}} if version else {"all": {}},
        "max_batch_size": queue.engine.cost.rows if batches else 0,
        "input": [_config_tensor(tensor, batches) for tensor in request or model.inputs],
        "output": [_config_tensor(tensor, batches) for tensor in model.outputs],
        "instance_group": [{"name": name, "kind": "KIND_CPU", "count": 1}],
        **({"dynamic_batching": {"max_queue_delay_microseconds": 0}} if batches else {}),
    }


def _config_tensor(tensor: Tensor, batches: bool) -> Report:
    datatype = "STRING" if tensor.datatype is Datatype.BYTES else tensor.datatype
    dims = tensor.shape[1:] if batches else tensor.shape
    reshaped: Report = {} if dims else {"reshape": {"shape": []}}
    return {"name": tensor.name, "data_type": f"TYPE_{datatype}", "dims": dims or [1], **reshaped}


# ---------------------------------------------------------------------------------------- statistics


def describe_statistics(
    served: Iterable[ServedEndpoint], metrics: ServerMetrics, *, version: str | None = None
) -> Report:
    """Return the statistics of endpoints by version. Runs are those of the model, which endpoints may share."""
    counts = metrics.snapshot()
    return {
        "model_stats": [
            _statistics(
                each.endpoint.name, queue, counts.get((each.endpoint.name, number)) or VersionMetrics()
            )
            for each in served
            for number, queue in each.queues.items()
            if version in (None, number)
        ]
    }


def _statistics(name: str, queue: BatchQueue, counts: VersionMetrics) -> Report:
    runs = statistics_of(queue.engine)
    requests = sum(counts.statuses.values())
    good = counts.statuses[200]
    failed_ns = round(counts.failed_seconds * 1e9)
    good_ns = max(round(counts.seconds * 1e9) - failed_ns, 0)
    waited_ns = max(good_ns - runs.total.ns * good // max(runs.total.runs, 1), 0)
    return {
        "name": name,
        "version": queue.model.version,
        "last_inference": runs.last_ms,
        "inference_count": counts.rows - counts.failed_rows,
        "execution_count": runs.total.runs,
        "inference_stats": {
            "success": _duration(good, good_ns),
            "fail": _duration(requests - good, failed_ns),
            "queue": _duration(good, waited_ns),
            **_compute(runs.total),
            "cache_hit": _duration(0, 0),
            "cache_miss": _duration(0, 0),
        },
        "batch_stats": [{"batch_size": rows, **_compute(totals)} for rows, totals in runs.by_rows().items()],
    }


def _compute(totals: RunTotals) -> Report:
    """Return the durations of runs; inputs and outputs are handed over where they are."""
    return {
        "compute_input": _duration(totals.runs, 0),
        "compute_infer": _duration(totals.runs, totals.ns),
        "compute_output": _duration(totals.runs, 0),
    }


def _duration(count: int, ns: int) -> dict[str, int]:
    return {"count": count, "ns": ns}


# ---------------------------------------------------------------------------------------- repository


def describe_index(served: Iterable[ServedEndpoint]) -> list[Report]:
    """Return the versions of endpoints that are served."""
    return [
        {"name": each.endpoint.name, "version": version, "state": "READY", "reason": ""}
        for each in served
        for version in each.answering
    ]


def read_index_request(body: bytes) -> None:
    """Check the request for the index; what is listed is ready, so that the answer does not depend on it."""
    _read(body, IndexRequest, "repository index")


def require_plain_load(body: bytes, endpoint: str) -> None:
    """Raise InvalidInput if a request to load a model wants to change its configuration or files."""
    parameters: Mapping[str, object] = _read(body, RepositoryLoad, "load").parameters or {}
    if parameters:
        given = shorten(", ".join(sorted(parameters)[:10]))
        raise InvalidInput(
            f"parameters: given {given}, allowed none: models come from the registry, and what is served from "
            f"falaj endpoints deploy MODEL@VERSION --name {endpoint}"
        )


def unload_refused(endpoint: str) -> Conflict:
    return Conflict(
        f"endpoint {endpoint} is served because it is deployed; to serve it no longer, use "
        f"falaj endpoints remove {endpoint}"
    )


def _read(body: bytes, kind: Any, what: str) -> Any:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"the body is not a {what} request: {error}") from None
