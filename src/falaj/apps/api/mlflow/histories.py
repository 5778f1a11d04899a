"""Routes of histories of metrics, of one run and of several."""

from __future__ import annotations

from typing import Any

import msgspec

from falaj.apps.api.mlflow.route import API, MlflowRoute, millis, next_page, number
from falaj.apps.api.mlflow.runs import RunId
from falaj.errors import InvalidInput
from falaj.records.tracking import CURVE_POINTS, HISTORY_POINTS, HistoryPoint

BULK = "/ajax-api/2.0/mlflow/metrics/get-history-bulk"


class GetHistory(RunId):
    metric_key: str = ""
    page_token: str = ""
    max_results: int | None = None


class BulkHistory(msgspec.Struct):
    run_id: list[str] = []
    metric_key: str = ""
    max_results: int | None = None


class BulkInterval(msgspec.Struct):
    run_ids: list[str] = []
    metric_key: str = ""
    start_step: int | None = None
    end_step: int | None = None
    max_results: int | None = None


def _point(key: str, run: str, found: HistoryPoint) -> dict[str, Any]:
    return {
        "key": key,
        "value": number(found.value),
        "timestamp": millis(found.timestamp),
        "step": found.step,
        "run_id": run,
    }


def _several(runs: list[str]) -> dict[str, Any]:
    if not runs:
        raise InvalidInput.at("run_ids", given="none", allowed="1 to 100 runs")
    return {"run": runs[0], "others": tuple(runs[1:])}


def _interval(request: BulkInterval) -> dict[str, Any]:
    given = _several(request.run_ids) | {"keys": (request.metric_key,)}
    if request.start_step is not None:
        given["from_step"] = request.start_step
    if request.end_step is not None:
        given["to_step"] = request.end_step
    if request.max_results is not None:
        given["points"] = min(max(request.max_results, 2), CURVE_POINTS)
    return given


def _points(_request: Any, found: Any) -> dict[str, Any]:
    return {"metrics": [_point(each.key, each.run, point) for each in found for point in each.points]}


def _page(request: Any, page: Any) -> dict[str, Any]:
    return _points(request, page.items) | next_page(page)


def _limit(given: int | None) -> int:
    return HISTORY_POINTS if given is None else min(max(given, 1), HISTORY_POINTS)


ROUTES = [
    MlflowRoute(
        "GET",
        f"{API}/metrics/get-history",
        "runs.history",
        GetHistory,
        lambda request: {
            "run": request.run,
            "key": request.metric_key,
            "after": request.page_token,
            "limit": _limit(request.max_results),
        },
        _page,
    ),
    MlflowRoute(
        "GET",
        BULK,
        "runs.history",
        BulkHistory,
        lambda request: {
            **_several(request.run_id),
            "key": request.metric_key,
            "limit": _limit(request.max_results),
        },
        _page,
        frozenset({"run_id"}),
    ),
    MlflowRoute(
        "GET",
        f"{API}/metrics/get-history-bulk-interval",
        "runs.curves",
        BulkInterval,
        _interval,
        _points,
        frozenset({"run_ids"}),
    ),
]
