"""An MLflow server, read by its REST API 2.0: experiments, runs, histories and artifacts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx
import msgspec
from pydantic import TypeAdapter, ValidationError

from falaj.errors import InvalidInput, TooLarge, Unauthenticated, Unavailable, shorten
from falaj.records.tracking import INT64_MAX, INT64_MIN, ArtifactPath
from falaj.sdk.run_import.mlflow_file import (
    DEFAULT_EXPERIMENT,
    NAME_TAG,
    PARENT_TAG,
    dataset_input,
    experiment_mark,
    run_status,
)
from falaj.sdk.run_import.source import (
    MODEL_STATUSES,
    ModelPoint,
    SourceExperiment,
    SourceFile,
    SourceModel,
    SourceNotes,
    SourceOwner,
    SourcePoint,
    SourceRun,
    from_millis,
    measured,
)

API = "/api/2.0/mlflow"
TIMEOUT = httpx.Timeout(120, connect=10)
TRIES, WAIT_S = 4, 0.5
ANSWER_BYTES = 256 << 20
PAGE_RUNS, PAGE_POINTS, MODELS = 500, 25_000, 50
PROXIED = "mlflow-artifacts:"
MOST_FILES, MOST_PAGES = 100_000, 1_000_000
VERSIONS = ("2", "3")
WORKSPACE_HEADER = "X-MLFLOW-WORKSPACE"

T = TypeVar("T")
_path: TypeAdapter[str] = TypeAdapter(ArtifactPath)


class Pair(msgspec.Struct):
    key: str
    value: str = ""


class FoundExperiment(msgspec.Struct):
    experiment_id: str
    name: str
    lifecycle_stage: str = "active"
    creation_time: int | None = None
    tags: list[Pair] = []


class FoundExperiments(msgspec.Struct):
    experiments: list[FoundExperiment] = []
    next_page_token: str = ""


class RunInfo(msgspec.Struct):
    run_id: str
    run_name: str = ""
    status: str | int = "RUNNING"
    start_time: int | None = None
    end_time: int | None = None
    user_id: str = ""
    lifecycle_stage: str = "active"


class FoundMetric(msgspec.Struct):
    key: str
    value: float | str = 0.0
    timestamp: int | None = None
    step: int = 0


class RunData(msgspec.Struct):
    metrics: list[FoundMetric] = []
    params: list[Pair] = []
    tags: list[Pair] = []


class FoundDataset(msgspec.Struct):
    name: str = ""
    digest: str = ""
    source_type: str = ""
    source: str = ""
    schema: str | None = None
    profile: str | None = None


class FoundInput(msgspec.Struct):
    dataset: FoundDataset
    tags: list[Pair] = []


class FoundInputs(msgspec.Struct):
    dataset_inputs: list[FoundInput] = []


class FoundRun(msgspec.Struct):
    info: RunInfo
    data: RunData = msgspec.field(default_factory=RunData)
    inputs: FoundInputs = msgspec.field(default_factory=FoundInputs)


class FoundRuns(msgspec.Struct):
    runs: list[FoundRun] = []
    next_page_token: str = ""


class FoundHistory(msgspec.Struct):
    metrics: list[FoundMetric] = []
    next_page_token: str = ""


class ListedFile(msgspec.Struct):
    path: str
    is_dir: bool = False
    file_size: int = 0


class ListedFiles(msgspec.Struct):
    files: list[ListedFile] = []
    next_page_token: str = ""


class ModelInfo(msgspec.Struct):
    model_id: str
    name: str = ""
    model_type: str = ""
    status: str | int = "LOGGED_MODEL_READY"
    source_run_id: str = ""
    artifact_uri: str = ""
    tags: list[Pair] = []


class ModelMeasurement(FoundMetric):
    run_id: str = ""
    dataset_name: str = ""
    dataset_digest: str = ""


class ModelData(msgspec.Struct):
    params: list[Pair] = []
    metrics: list[ModelMeasurement] = []


class FoundModel(msgspec.Struct):
    info: ModelInfo
    data: ModelData = msgspec.field(default_factory=ModelData)


class FoundModels(msgspec.Struct):
    models: list[FoundModel] = []
    next_page_token: str = ""


class MlflowServer:
    """A server of MLflow 2 or 3. It is asked as its own clients ask it, with their variables of the environment."""

    kind = "mlflow"

    def __init__(self, url: str) -> None:
        self.where = url.rstrip("/")
        self.notes = SourceNotes()
        self._client = _client(self.where)
        self._held: tuple[str, dict[str, list[SourcePoint]]] = ("", {})
        self._keys: dict[str, list[str]] = {}
        try:
            self._require_version()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._client.close()

    def _require_version(self) -> None:
        """Raise InvalidInput if the server says that it is of another version; one that says nothing is tried."""
        status, answer = self._get("/version", {}, accepted=range(100, 500))
        version = answer.decode("utf-8", "replace").strip()
        major = version.partition(".")[0]
        if status == 200 and major.isdecimal() and major not in VERSIONS:
            raise InvalidInput.at(
                self.where, given=f"MLflow {shorten(version, limit=20)}", allowed="a server of MLflow 2 or 3"
            )

    # ---------------------------------------------------------------------------------------- reading

    def experiments(self) -> list[SourceExperiment]:
        ask = {"max_results": 1000, "view_type": "ALL"}
        found = [
            each
            for page in self._pages("POST", f"{API}/experiments/search", ask, FoundExperiments)
            for each in page.experiments
        ]
        found.sort(key=lambda each: (len(each.experiment_id), each.experiment_id))
        return [
            SourceExperiment(
                each.experiment_id,
                each.name,
                experiment_mark(each.experiment_id, each.name, each.creation_time),
                {tag.key: tag.value for tag in each.tags},
                is_deleted=each.lifecycle_stage == "deleted",
            )
            for each in found
            if each.experiment_id != DEFAULT_EXPERIMENT or each.tags or self._has_runs(each.experiment_id)
        ]

    def _has_runs(self, experiment: str) -> bool:
        ask = {"experiment_ids": [experiment], "run_view_type": "ALL", "max_results": 1}
        return bool(self._ask("POST", f"{API}/runs/search", ask, FoundRuns).runs)

    def rows(self, experiments: Sequence[SourceExperiment]) -> None:
        """A server does not tell before its runs are read."""

    def runs(self, experiment: SourceExperiment) -> Iterator[SourceRun]:
        ask = {
            "experiment_ids": [experiment.id],
            "run_view_type": "ALL",
            "max_results": PAGE_RUNS,
            "order_by": ["attributes.start_time ASC"],
        }
        for page in self._pages("POST", f"{API}/runs/search", ask, FoundRuns):
            for each in page.runs:
                yield self._run(experiment, each)

    def _run(self, experiment: SourceExperiment, found: FoundRun) -> SourceRun:
        info, tags = found.info, {tag.key: tag.value for tag in found.data.tags}
        self._keys[info.run_id] = [metric.key for metric in found.data.metrics]
        datasets = [
            dataset_input(
                each.dataset.name,
                each.dataset.digest,
                each.dataset.source_type,
                each.dataset.source,
                each.dataset.schema,
                each.dataset.profile,
                tags={tag.key: tag.value for tag in each.tags},
                notes=self.notes,
                run=info.run_id,
            )
            for each in found.inputs.dataset_inputs
        ]
        return SourceRun(
            id=info.run_id,
            experiment=experiment.id,
            name=info.run_name or tags.get(NAME_TAG, ""),
            status=run_status(str(info.status), self.notes, info.run_id),
            started_at=from_millis(info.start_time),
            ended_at=from_millis(info.end_time or None),
            user=info.user_id,
            parent=tags.get(PARENT_TAG),
            is_deleted=info.lifecycle_stage == "deleted",
            params={param.key: param.value for param in found.data.params},
            tags={key: value for key, value in tags.items() if key not in (NAME_TAG, PARENT_TAG)},
            datasets=[each for each in datasets if each is not None],
        )

    def series(self, run: SourceRun) -> Mapping[str, int]:
        return {key: len(points) for key, points in self._histories(run).items()}

    def points(self, run: SourceRun, keys: Collection[str]) -> Iterator[SourcePoint]:
        for key, points in self._histories(run).items():
            if key in keys:
                yield from points

    def _histories(self, run: SourceRun) -> dict[str, list[SourcePoint]]:
        """Return the points of a run by metric; those of the last run are held."""
        if self._held[0] != run.id:
            self._held = ("", {})  # frees the memory before the next run's are read
            keys = self._keys.get(run.id, ())
            self._held = (run.id, {key: self._history(run.id, key) for key in keys})
        return self._held[1]

    def _history(self, run: str, key: str) -> list[SourcePoint]:
        ask = {"run_id": run, "run_uuid": run, "metric_key": key, "max_results": PAGE_POINTS}
        points: dict[tuple[Any, ...], SourcePoint] = {}
        for page in self._pages("GET", f"{API}/metrics/get-history", ask, FoundHistory):
            for each in page.metrics:
                for point in self._point(run, each):
                    points.setdefault((point.step, point.at, str(point.value)), point._replace(key=key))
        return sorted(points.values(), key=lambda point: (point.step, point.at))

    def _point(self, owner: str, found: FoundMetric) -> Iterator[SourcePoint]:
        """Yield a point, or note that it is none."""
        at = from_millis(found.timestamp)
        try:
            value = measured(float(found.value))
        except ValueError:
            at, value = None, 0.0
        if at is None or not INT64_MIN <= found.step <= INT64_MAX:
            self.notes.add("points without a number, a whole step or a date", f"{owner} {found.key}")
        else:
            yield SourcePoint(found.key, value, found.step, at)

    def models(self, experiment: SourceExperiment) -> Iterator[SourceModel]:
        path = f"{API}/logged-models/search"
        ask = {"experiment_ids": [experiment.id], "max_results": MODELS}
        status, _ = self._send(
            lambda: self._client.build_request("POST", path, json=ask), path, (200, 404, 405)
        )
        if status != 200:  # before MLflow 3
            return
        for page in self._pages("POST", path, ask, FoundModels):
            for each in page.models:
                yield self._model(experiment, each)

    def _model(self, experiment: SourceExperiment, found: FoundModel) -> SourceModel:
        info = found.info
        points = []
        for each in found.data.metrics:
            for point in self._point(info.model_id, each):
                dataset, digest = each.dataset_name or None, each.dataset_digest or None
                points.append(ModelPoint(each.run_id, point, dataset, digest))
        return SourceModel(
            id=info.model_id,
            experiment=experiment.id,
            name=info.name,
            type=info.model_type,
            status=MODEL_STATUSES.get(info.status, "failed"),
            run=info.source_run_id or None,
            params={param.key: param.value for param in found.data.params},
            tags={tag.key: tag.value for tag in info.tags},
            points=points,
            place=info.artifact_uri,
        )

    # -------------------------------------------------------------------------------------- artifacts

    def files(self, owner: SourceOwner) -> list[SourceFile]:
        found: dict[str, SourceFile] = {}
        waiting = [""]
        while waiting:
            folder = waiting.pop()
            for page in self._listings(owner, folder):
                for each in page.files:
                    if not _is_inside(each.path, folder):
                        self.notes.add("artifacts whose paths are not below their folder", shorten(each.path))
                    elif each.is_dir:
                        waiting.append(each.path)
                    else:
                        found[each.path] = SourceFile(each.path, each.file_size)
                if len(found) + len(waiting) > MOST_FILES:
                    raise TooLarge.at(
                        owner.id,
                        given=f"more than {MOST_FILES} artifacts",
                        allowed=f"at most {MOST_FILES}",
                    )
        return sorted(found.values())

    def _listings(self, owner: SourceOwner, folder: str) -> Iterator[ListedFiles]:
        if isinstance(owner, SourceRun):
            ask = {"run_id": owner.id, "run_uuid": owner.id} | ({"path": folder} if folder else {})
            return self._pages("GET", f"{API}/artifacts/list", ask, ListedFiles)
        if not owner.place.startswith(PROXIED):
            self.notes.add("files of logged models that the server does not hand out", owner.id)
            return iter(())
        ask = {"artifact_directory_path": folder} if folder else {}
        path = f"{API}/logged-models/{quote(owner.id, safe='')}/artifacts/directories"
        return self._pages("GET", path, ask, ListedFiles)

    def read(self, owner: SourceOwner, path: str) -> Iterator[bytes]:
        where, query = "/get-artifact", {"run_id": owner.id, "run_uuid": owner.id, "path": path}
        if isinstance(owner, SourceModel):
            root = owner.place.removeprefix(PROXIED).strip("/")
            where, query = f"/api/2.0/mlflow-artifacts/artifacts/{quote(f'{root}/{path}')}", {}
        with self._reachable(), self._client.stream("GET", where, params=query) as response:
            if response.status_code != 200:
                response.read()
                raise self._refusal(response.status_code, response.content, f"{where} of {path}")
            yield from response.iter_bytes(1 << 20)

    # --------------------------------------------------------------------------------------- requests

    def _pages(self, method: str, path: str, ask: Mapping[str, Any], kind: type[T]) -> Iterator[T]:
        token, seen = "", set[str]()
        while True:
            page = self._ask(method, path, {**ask, **({"page_token": token} if token else {})}, kind)
            yield page
            token = page.next_page_token  # type: ignore[attr-defined]
            if not token:
                return
            if token in seen or len(seen) > MOST_PAGES:
                raise InvalidInput.at(f"{self.where}{path}", given="a page again", allowed="pages that end")
            seen.add(token)

    def _ask(self, method: str, path: str, ask: Mapping[str, Any], kind: type[T]) -> T:
        if method == "GET":
            _, answer = self._get(path, ask)
        else:
            _, answer = self._send(lambda: self._client.build_request(method, path, json=ask), path)
        try:
            return msgspec.convert(json.loads(answer), kind, strict=False)
        except (ValueError, RecursionError) as error:
            raise InvalidInput.at(
                f"{self.where}{path}",
                given=shorten(str(error)),
                allowed="an answer of MLflow's REST API 2.0",
                fix="give the address that MLFLOW_TRACKING_URI has",
            ) from None

    def _get(
        self, path: str, query: Mapping[str, Any], *, accepted: Collection[int] = (200,)
    ) -> tuple[int, bytes]:
        return self._send(lambda: self._client.build_request("GET", path, params=query), path, accepted)

    def _send(
        self, build: Callable[[], httpx.Request], path: str, accepted: Collection[int] = (200,)
    ) -> tuple[int, bytes]:
        """Return the status and the answer; a server that is busy or away for a moment is asked again."""
        for attempt in range(TRIES):
            try:
                with self._reachable():
                    status, answer = self._receive(build(), path)
            except Unavailable:
                if attempt == TRIES - 1:
                    raise
            else:
                if status != 429 and status < 500:
                    break
                if attempt == TRIES - 1:
                    raise Unavailable(f"{self.where}{path} answers {status}")
            time.sleep(WAIT_S * 2**attempt)
        if status not in accepted:
            raise self._refusal(status, answer, path)
        return status, answer

    def _receive(self, request: httpx.Request, path: str) -> tuple[int, bytes]:
        response = self._client.send(request, stream=True)
        try:
            parts, size = [], 0
            for part in response.iter_bytes():
                size += len(part)
                if size > ANSWER_BYTES:
                    raise TooLarge.at(
                        f"{self.where}{path}",
                        given=f"more than {ANSWER_BYTES} bytes",
                        allowed="a smaller answer",
                    )
                parts.append(part)
            return response.status_code, b"".join(parts)
        finally:
            response.close()

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            raise Unavailable(f"{self.where} does not answer: {error or type(error).__name__}") from None

    def _refusal(self, status: int, answer: bytes, path: str) -> Exception:
        if status in (401, 403):
            return Unauthenticated(
                f"{self.where} answers {status}: set MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, to someone who may read it"
            )
        return InvalidInput.at(
            f"{self.where}{path}",
            given=f"{status} {shorten(answer.decode('utf-8', 'replace'))}",
            allowed="an answer of MLflow's REST API 2.0",
            fix="give the address that MLFLOW_TRACKING_URI has",
        )


def _client(url: str) -> httpx.Client:
    """Return a client with the credentials of MLflow's own variables; redirects, which might leak them, are refused."""
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise InvalidInput.at(
            "SOURCE",
            given="an address with a name or a password",
            allowed="an address without, as others see what is typed",
            fix="set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
        )
    named = os.environ.get
    headers, auth = {}, None
    if token := named("MLFLOW_TRACKING_TOKEN", "").strip():
        headers["Authorization"] = f"Bearer {token}"
    elif user := named("MLFLOW_TRACKING_USERNAME"):
        auth = httpx.BasicAuth(user, named("MLFLOW_TRACKING_PASSWORD", ""))
    if workspace := named("MLFLOW_WORKSPACE"):
        headers[WORKSPACE_HEADER] = workspace
    verify: Any = True
    if bundle := named("MLFLOW_TRACKING_SERVER_CERT_PATH"):
        import ssl

        verify = ssl.create_default_context(cafile=bundle)
    try:
        return httpx.Client(
            base_url=url, headers=headers, auth=auth, timeout=TIMEOUT, verify=verify, trust_env=False
        )
    except (httpx.InvalidURL, ValueError, OSError) as error:
        raise InvalidInput.at(
            "SOURCE", given=url, allowed=f"an address like http://host:5000 ({type(error).__name__})"
        ) from None


def _is_inside(path: str, folder: str) -> bool:
    """Return whether a path is valid and below `folder`."""
    try:
        _path.validate_python(path)
    except ValidationError:
        return False
    return not folder or path.startswith(f"{folder}/")
