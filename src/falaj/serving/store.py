"""SQL of serving: endpoints, request counts, prediction batches and labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import RowMapping, delete, func, insert, select, update

from falaj.governance import objects
from falaj.governance.operations.call import Call
from falaj.governance.tables import blobs
from falaj.governance.tables import objects as objects_table
from falaj.ports.metadata import Transaction, to_micros
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ObjectId
from falaj.records.registry import ModelVersion
from falaj.records.serving.endpoints import (
    DeployedEndpoint,
    LoadProblem,
    Route,
    ScoringRule,
    ServedRoute,
    StickyKey,
)
from falaj.records.serving.lookups import Lookup
from falaj.records.serving.predictions import PredictionBatch
from falaj.records.serving.settings import MeasuredVersion, ServingSettings
from falaj.records.serving.shadows import ShadowCounts, ShadowDifference
from falaj.records.serving.statistics import Observation, VersionCounts, VersionStats, percentile_ms
from falaj.serving.scores import difference_of, merge_counts, slow_bound_s, slower_than
from falaj.serving.tables import (
    batches,
    counts,
    endpoints,
    labels,
    measurements,
    observations,
    problems,
    protections,
    settings,
    shadows,
    unannounced,
)

SLICE = 900
"""Values per IN list: below the limit of every supported database."""

KEPT_OBSERVATIONS = 1_000_000
"""Observations of an endpoint that stays divided; at one report every five seconds, those of 58 days."""

_REVISION = "SELECT revision FROM serving_revision WHERE id = 1"
_ADVANCE = (
    "INSERT INTO serving_revision (id, revision) VALUES (1, 1) "
    "ON CONFLICT (id) DO UPDATE SET revision = serving_revision.revision + 1 RETURNING revision"
)
_COUNT_UNANNOUNCED = (
    "INSERT INTO serving_unannounced (endpoint, version, batches, rows, since, until, newest) "
    "VALUES (?, ?, 1, ?, ?, ?, ?) ON CONFLICT (endpoint, version) DO UPDATE SET "
    "batches = serving_unannounced.batches + 1, rows = serving_unannounced.rows + excluded.rows, "
    "until = excluded.until, newest = excluded.newest RETURNING batches"
)


class UnannouncedPredictions(NamedTuple):
    """Batches of a version at an endpoint, from `since` to `until`; `newest` is the id of the last of them."""

    endpoint: ObjectId
    version: ObjectId
    batches: int
    rows: int
    since: datetime
    until: datetime
    newest: ObjectId


_PROBLEM_MARKS = "SELECT endpoint, version, problem FROM serving_problems WHERE endpoint"
_NEWEST_COUNTS = (
    "SELECT at, requests, errors FROM serving_counts WHERE endpoint = ? AND version = ? "
    "ORDER BY at DESC LIMIT 1"
)


# ------------------------------------------------------------------------------------------- endpoints


def revision(tx: Transaction) -> int:
    """Return the revision number, which grows with every change of an endpoint."""
    rows = tx.execute_sql(_REVISION)
    return int(rows[0][0]) if rows else 0


def advance(tx: Transaction) -> None:
    tx.execute_sql(_ADVANCE)


def put_endpoint(
    call: Call,
    ident: str,
    *,
    model: str,
    routes: Sequence[ServedRoute],
    lookup: Lookup | None,
    sticky: StickyKey | None,
    scoring: ScoringRule | None,
) -> None:
    """Create or change an endpoint; its current routes become its previous routes."""
    before = endpoint_row(call.tx, ident)
    values = {
        "model": model,
        "routes": [_row(route) for route in routes],
        "previous": [] if before is None else _plain(before["routes"]),
        "lookup": None if lookup is None else lookup.model_dump(mode="json"),
        "scoring": scoring,
        "sticky": sticky,
        "changed_at": call.now,
    }
    if before is None:
        call.tx.execute(insert(endpoints), {"id": ident, **values})
    else:
        call.tx.execute(update(endpoints).where(endpoints.c.id == ident).values(**values))
        call.tx.execute(delete(observations).where(observations.c.endpoint == ident))
        call.tx.execute(delete(shadows).where(shadows.c.endpoint == ident))
    advance(call.tx)


def endpoint_row(tx: Transaction, ident: str) -> RowMapping | None:
    return tx.execute(select(endpoints).where(endpoints.c.id == ident)).mappings().first()


def endpoints_of(tx: Transaction, version: ModelVersion) -> list[ObjectId]:
    """Return the endpoints that serve the model of `version`: those of its workspace, and others that route to it."""
    query = select(endpoints.c.id, endpoints.c.routes, endpoints.c.previous, objects_table.c.workspace)
    query = query.join(objects_table, objects_table.c.id == endpoints.c.id)
    return [
        row.id
        for row in tx.execute(query.where(endpoints.c.model == version.name))
        if row.workspace == version.workspace
        or any(each.get("id") == version.id for each in [*row.routes, *row.previous])
    ]


def protection(tx: Transaction, found: StoredObject) -> RowMapping | None:
    """Return the row that says whether the endpoint is protected; without an alias it was released."""
    return tx.execute(select(protections).where(*_named(found))).mappings().first()


def set_protection(call: Call, found: StoredObject, alias: str | None, *, independent: bool) -> None:
    """Protect an endpoint by the approvals for `alias`, or release it."""
    values = {"alias": alias, "independent": independent, "by": call.caller.id, "at": call.now}
    if call.tx.execute(update(protections).where(*_named(found)).values(**values)).rowcount == 0:
        call.tx.execute(insert(protections), {"workspace": found.workspace, "name": found.name, **values})


def _named(found: StoredObject) -> tuple[Any, ...]:
    return protections.c.workspace == found.workspace, protections.c.name == found.name


def endpoint_record(tx: Transaction, found: StoredObject, *, url: str | None = None) -> DeployedEndpoint:
    row = tx.execute(select(endpoints).where(endpoints.c.id == found.id)).mappings().one()
    known = select(problems.c.version, problems.c.problem).where(problems.c.endpoint == found.id)
    wrong = {row.version: row.problem for row in tx.execute(known)}
    lost = select(func.coalesce(func.sum(counts.c.lost), 0)).where(counts.c.endpoint == found.id)
    return DeployedEndpoint(
        id=found.id,
        workspace=found.workspace,
        name=found.name,
        model=row["model"],
        routes=tuple(ServedRoute(**each, problem=wrong.get(each["version"])) for each in row["routes"]),
        previous=tuple(Route.model_validate(each) for each in row["previous"]),
        lookup=None if row["lookup"] is None else Lookup.model_validate(row["lookup"]),
        scoring=None if row["scoring"] is None else ScoringRule(row["scoring"]),
        settings=settings_of(tx, found.id),
        measured=_measured(tx, found.id, [each["version"] for each in row["routes"]]),
        sticky=row["sticky"],
        zone=found.zone or "",
        label=found.label,
        url=url,
        unlogged=int(tx.execute(lost).scalar_one()),
        created_at=found.created_at,
        changed_at=row["changed_at"],
    )


def all_endpoints(tx: Transaction) -> list[DeployedEndpoint]:
    """Return the endpoints of all workspaces, for the model server."""
    query = (
        select(objects_table)
        .join(endpoints, endpoints.c.id == objects_table.c.id)
        .where(objects_table.c.deleted_at.is_(None))
        .order_by(objects_table.c.id)
    )
    found = [objects.stored_object(row) for row in tx.execute(query).mappings()]
    return [endpoint_record(tx, each) for each in found]


def change_marks(tx: Transaction, idents: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return, for each version that an endpoint routes to, what differs once requests or problems were reported."""
    found = list(objects.rows_by_ids(tx, _PROBLEM_MARKS, idents))
    for row in tx.execute(select(endpoints.c.id, endpoints.c.routes).where(endpoints.c.id.in_(idents))):
        for route in row.routes:
            newest = tx.execute_sql(_NEWEST_COUNTS, (row.id, str(route["version"])))
            found.append((row.id, str(route["version"]), *newest))
    return found


def settings_of(tx: Transaction, endpoint: str) -> ServingSettings:
    """Return the settings of an endpoint; those of one that nobody has configured are empty."""
    row = tx.execute(select(settings.c.settings).where(settings.c.endpoint == endpoint)).first()
    return ServingSettings() if row is None else ServingSettings.model_validate(row.settings)


def set_settings(tx: Transaction, endpoint: str, given: ServingSettings) -> None:
    """Replace the settings of an endpoint; the model server loads its versions again with them."""
    tx.execute(delete(settings).where(settings.c.endpoint == endpoint))
    row = {"endpoint": endpoint, "settings": given.model_dump(mode="json", exclude_none=True)}
    tx.execute(insert(settings), row)
    advance(tx)


def set_measurements(tx: Transaction, endpoint: str, found: Sequence[MeasuredVersion]) -> None:
    for each in found:
        same = measurements.c.endpoint == endpoint, measurements.c.version == each.version
        tx.execute(delete(measurements).where(*same))
        row = {"endpoint": endpoint, "version": each.version, "measured": each.model_dump(mode="json")}
        tx.execute(insert(measurements), row)


def _measured(tx: Transaction, endpoint: str, versions: Sequence[str]) -> tuple[MeasuredVersion, ...]:
    """Return what was measured of the given versions."""
    rows = tx.execute(select(measurements).where(measurements.c.endpoint == endpoint)).mappings()
    found = {row["version"]: MeasuredVersion.model_validate(row["measured"]) for row in rows}
    return tuple(found[version] for version in versions if version in found)


def set_scoring(tx: Transaction, ident: str, scoring: ScoringRule) -> None:
    tx.execute(update(endpoints).where(endpoints.c.id == ident).values(scoring=scoring))


def _row(route: ServedRoute) -> dict[str, Any]:
    """Return a route as it is stored; what most routes are not is left out."""
    shadow = {"shadow": route.shadow} if route.shadow else {}
    fallback = {"fallback": True} if route.fallback else {}
    return {"version": route.version, "weight": route.weight, "id": route.id, **shadow, **fallback}


def _plain(routes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in route.items() if name != "id"} for route in routes]


# ------------------------------------------------------------------------------ counts and problems


def set_problems(tx: Transaction, endpoint: str, found: Sequence[LoadProblem], *, now: datetime) -> None:
    for each in found:
        same = problems.c.endpoint == endpoint, problems.c.version == each.version
        tx.execute(delete(problems).where(*same))
        if each.problem is not None:
            row = {"endpoint": endpoint, "version": each.version, "problem": each.problem, "at": now}
            tx.execute(insert(problems), row)


def add_counts(tx: Transaction, endpoint: str, found: Sequence[VersionCounts], *, now: datetime) -> None:
    """Add counts to the minute of `now`, or to the part of it since the routes changed."""
    requests = [each for each in found if each.requests]
    if requests and divided_since(tx, endpoint) is not None:
        observe(tx, endpoint, now=now, requests=requests)
    minute = _begin(tx, endpoint, now)
    for each in found:
        same = counts.c.endpoint == endpoint, counts.c.version == each.version, counts.c.at == minute
        new = each.model_dump(exclude={"version"}) | {"latency": list(each.latency)}
        row = tx.execute(select(counts).where(*same).with_for_update()).mappings().first()
        if row is None:
            tx.execute(insert(counts), {"endpoint": endpoint, "version": each.version, "at": minute, **new})
            continue
        sums = {name: row[name] + new[name] for name in ("requests", "errors", "rows", "lost")}
        tx.execute(
            update(counts).where(*same).values(**sums, latency=_summed([row["latency"], new["latency"]]))
        )


def add_shadows(tx: Transaction, endpoint: str, found: Sequence[ShadowCounts]) -> None:
    """Add what copies of requests showed to what is known since the routes changed; what is no shadow is left out."""
    if not found:
        return
    row = tx.execute(select(endpoints).where(endpoints.c.id == endpoint).with_for_update()).mappings().first()
    known = {each["version"] for each in (row["routes"] if row is not None else ()) if each.get("shadow")}
    for each in found:
        if row is None or each.version not in known:
            continue
        same = (
            shadows.c.endpoint == endpoint,
            shadows.c.version == each.version,
            shadows.c.against == each.against,
        )
        before = tx.execute(select(shadows.c.counts).where(*same)).scalar()
        if before is None:
            key = {"endpoint": endpoint, "version": each.version, "against": each.against}
            new = {"counts": each.model_dump(mode="json"), "since": row["changed_at"]}
            tx.execute(insert(shadows), key | new)
        else:
            both = merge_counts(ShadowCounts.model_validate(before), each)
            tx.execute(update(shadows).where(*same).values(counts=both.model_dump(mode="json")))


def shadow_differences(tx: Transaction, endpoint: str) -> tuple[ShadowDifference, ...]:
    """Return how each shadow differs from each version that answered, since the routes changed."""
    rows = tx.execute(select(shadows).where(shadows.c.endpoint == endpoint)).mappings()
    found = [difference_of(ShadowCounts.model_validate(row["counts"]), since=row["since"]) for row in rows]
    return tuple(sorted(found, key=lambda each: (len(each.version), each.version, each.against)))


def _begin(tx: Transaction, endpoint: str, moment: datetime) -> datetime:
    """Return the start of the counting period of `moment`: its minute, or the last change of the routes in it.

    So the counts of a canary exclude requests from before it.
    """
    minute, row = moment.replace(second=0, microsecond=0), endpoint_row(tx, endpoint)
    return minute if row is None or row["changed_at"] > moment else max(minute, row["changed_at"])


def stats(
    tx: Transaction, endpoint: str, *, since: datetime | None, until: datetime | None = None
) -> tuple[VersionStats, ...]:
    """Return the statistics of each version in a time: labels exactly, requests by counting period."""
    query = select(counts).where(counts.c.endpoint == endpoint)
    if since is not None:
        query = query.where(counts.c.at >= _begin(tx, endpoint, since))
    if until is not None:
        query = query.where(counts.c.at < _begin(tx, endpoint, until))
    found: dict[str, list[RowMapping]] = {}
    for row in tx.execute(query).mappings():
        found.setdefault(row["version"], []).append(row)
    scored = _scored(tx, endpoint, since, until)
    versions = sorted({*found, *scored}, key=lambda version: (len(version), version))
    return tuple(_version_stats(each, found.get(each, []), scored.get(each, {})) for each in versions)


def _version_stats(version: str, rows: Sequence[RowMapping], scored: dict[str, Any]) -> VersionStats:
    latency = _summed([row["latency"] for row in rows])
    slow_s = slow_bound_s(latency)
    sums = {name: sum(row[name] for row in rows) for name in ("requests", "errors", "rows")}
    return VersionStats(
        version=version,
        p50_ms=percentile_ms(latency, 0.5),
        p99_ms=percentile_ms(latency, 0.99),
        slow_ms=None if slow_s is None else 1000 * slow_s,
        slow_share=None if slow_s is None else slower_than(latency, slow_s) / sum(latency),
        **sums,
        **scored,
    )


def _scored(
    tx: Transaction, endpoint: str, since: datetime | None, until: datetime | None
) -> dict[str, dict[str, Any]]:
    """Return the number of scored labels of each version, of those without a score, and the mean and variance."""
    of_it = [labels.c.endpoint == endpoint]
    if since is not None:
        of_it.append(labels.c.predicted_at >= since)
    if until is not None:
        of_it.append(labels.c.predicted_at < until)
    score = labels.c.score
    means = select(labels.c.version, func.count(), func.count(score), func.avg(score)).where(*of_it)
    found: dict[str, dict[str, Any]] = {}
    for version, every, number, mean in tx.execute(means.group_by(labels.c.version)):
        found[version] = {"labelled": number, "unscored": every - number}
        if number:
            apart = score - float(mean)
            squares = select(func.sum(apart * apart)).where(*of_it, labels.c.version == version)
            total = float(tx.execute(squares).scalar_one())
            variance = total / (number - 1) if number > 1 else None
            found[version] |= {"score_mean": float(mean), "score_variance": variance}
    return found


def divided_since(tx: Transaction, endpoint: str) -> datetime | None:
    """Lock an endpoint, and return since when several versions have a share of its requests; None if one has all."""
    row = tx.execute(select(endpoints).where(endpoints.c.id == endpoint).with_for_update()).mappings().first()
    if row is None or sum(route["weight"] > 0 for route in row["routes"]) < 2:
        return None
    since: datetime = row["changed_at"]
    return since


def observe(
    tx: Transaction,
    endpoint: str,
    *,
    now: datetime,
    requests: Sequence[VersionCounts] = (),
    scores: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Append what came in together. The caller has locked the endpoint, so numbers grow in the order of commits."""
    of_it = observations.c.endpoint == endpoint
    number = (tx.execute(select(func.max(observations.c.number)).where(of_it)).scalar_one() or 0) + 1
    tx.execute(delete(observations).where(of_it, observations.c.number <= number - KEPT_OBSERVATIONS))
    row = {
        "endpoint": endpoint,
        "number": number,
        "at": now,
        "requests": [each.model_dump(mode="json") for each in requests],
        "scores": dict(scores or {}),
    }
    tx.execute(insert(observations), row)


def observations_after(tx: Transaction, endpoint: str, after: int, *, limit: int) -> list[Observation]:
    """Return the observations since the routes changed, from the one that follows number `after`."""
    query = select(observations).where(observations.c.endpoint == endpoint, observations.c.number > after)
    rows = tx.execute(query.order_by(observations.c.number).limit(limit)).mappings()
    return [Observation.model_validate({key: row[key] for key in Observation.model_fields}) for row in rows]


def _summed(lists: Sequence[Sequence[int]]) -> list[int]:
    """Return element-wise sums; short lists are padded with zeros."""
    longest = max((len(each) for each in lists), default=0)
    return [sum(each[n] for each in lists if n < len(each)) for n in range(longest)]


# -------------------------------------------------------------------------------- batches and labels


def add_batch(
    tx: Transaction,
    new: StoredObject,
    *,
    endpoint: ObjectId,
    version: str,
    rows: int,
    key: str,
    size_bytes: int,
    sha256: str,
) -> PredictionBatch:
    blob = {"id": new.id, "key": key, "size_bytes": size_bytes, "sha256": sha256, "staged_until": None}
    tx.execute(insert(blobs), blob)
    batch = PredictionBatch(
        id=new.id,
        endpoint=endpoint,
        version=version,
        rows=rows,
        size_bytes=size_bytes,
        created_at=new.created_at,
    )
    tx.execute(insert(batches), batch.model_dump(include={"id", "endpoint", "version", "rows"}))
    return batch


def batch_row(tx: Transaction, ident: str) -> RowMapping | None:
    """Return the row of a batch with the key of its blob."""
    query = select(batches, blobs.c.key).join(blobs, blobs.c.id == batches.c.id)
    return tx.execute(query.where(batches.c.id == ident)).mappings().first()


def count_unannounced(tx: Transaction, batch: PredictionBatch, *, version: ObjectId) -> None:
    """Count a batch among those of its endpoint and version that no event has told of."""
    at = to_micros(batch.created_at)
    tx.execute_sql(_COUNT_UNANNOUNCED, (batch.endpoint, version, batch.rows, at, at, batch.id))


def has_unannounced(tx: Transaction) -> bool:
    return tx.execute(select(unannounced.c.endpoint).limit(1)).first() is not None


def take_unannounced(tx: Transaction) -> list[UnannouncedPredictions]:
    """Return the counts of all batches that no event has told of, and forget them."""
    taken = tx.execute(delete(unannounced).returning(*unannounced.c)).mappings()
    return sorted((UnannouncedPredictions(**row) for row in taken), key=lambda each: each.newest)


def put_labels(tx: Transaction, rows: Sequence[dict[str, Any]]) -> set[str]:
    """Store labels, replacing earlier ones of the same predictions; return the predictions that had one."""
    replaced: set[str] = set()
    for start in range(0, len(rows), SLICE):
        idents = [row["prediction"] for row in rows[start : start + SLICE]]
        earlier = delete(labels).where(labels.c.prediction.in_(idents)).returning(labels.c.prediction)
        replaced.update(tx.execute(earlier).scalars())
    if rows:
        tx.execute(insert(labels), list(rows))
    return replaced


def label_of(tx: Transaction, prediction: str) -> tuple[float | None, float | None]:
    """Return the label and the score of a prediction, if it has them."""
    query = select(labels.c.value, labels.c.score).where(labels.c.prediction == prediction)
    row = tx.execute(query).first()
    return (None, None) if row is None else (row.value, row.score)
