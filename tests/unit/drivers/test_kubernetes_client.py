"""The client of a cluster: its configuration, and its errors in words. The answers are those of a real API server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from falaj.assembly.compute import secret_files
from falaj.drivers.kubernetes.client import connect, resource_of, translated
from falaj.drivers.kubernetes.cluster import ApiCluster
from falaj.errors import (
    AlreadyExists,
    ConfigInvalid,
    Conflict,
    FalajError,
    InvalidInput,
    NotFound,
    Unavailable,
)
from falaj.ports.cluster.manifests import ObjectKind
from falaj.records.config import Config, KubernetesConfig

NODE = ObjectKind("", "v1", "Node", "nodes")
Answer = tuple[int, str, bytes]


@pytest.fixture
def api_server() -> Iterator[dict[str, Any]]:
    """Yield the address of a server; it gives the `answer` that the test sets to every request."""
    state: dict[str, Any] = {"answer": (200, "application/json", b"{}")}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = state.get("token") in (None, self.headers["Authorization"])
            code, kind, body = state["answer"] if is_known else status(401, "Unauthorized", "Unauthorized")
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    state["url"] = f"http://127.0.0.1:{server.server_port}"
    yield state
    server.shutdown()
    server.server_close()


def status(code: int, reason: str, message: str, **details: Any) -> Answer:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "details": details,
        "code": code,
    }
    return code, "application/json", json.dumps(body).encode()


def kubeconfig(
    folder: Path, server: str, *, user: dict[str, Any] | None = None, context: str = "here"
) -> Path:
    path = folder / "kubeconfig"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": context,
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "t"} if user is None else user}],
    }
    path.write_text(json.dumps(document))
    return path


def test_credentials_that_were_renewed_in_the_kubeconfig_are_used(
    api_server: dict[str, Any], tmp_path: Path
) -> None:
    config = KubernetesConfig(kubeconfig=kubeconfig(tmp_path, api_server["url"]))
    client = connect(config)
    api_server["answer"] = 200, "application/json", b'{"metadata": {"name": "n1"}}'
    client.get(resource_of(NODE), "n1")

    api_server["token"] = "Bearer new"
    with pytest.raises(Unavailable, match="they have expired or were revoked"), translated("read a node"):
        client.get(resource_of(NODE), "n1")
    kubeconfig(tmp_path, api_server["url"], user={"token": "new"})
    found = client.get(resource_of(NODE), "n1")

    assert found["metadata"]["name"] == "n1"
    client.close()


def failure(folder: Path, server: str, action: str = "list nodes", **given: Any) -> FalajError:
    """Return the error of a request to `server`."""
    client = connect(KubernetesConfig(kubeconfig=kubeconfig(folder, server, **given)))
    try:
        with pytest.raises(FalajError) as caught, translated(action):
            client.get(resource_of(NODE), "n1")
    finally:
        client.close()
    return caught.value


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (
            status(401, "Unauthorized", "Unauthorized"),
            Unavailable,
            "does not accept the credentials of the platform; they have expired or were revoked",
        ),
        (
            status(
                403,
                "Forbidden",
                'nodes is forbidden: User "system:serviceaccount:falaj:falaj" cannot list resource "nodes" in '
                'API group "" at the cluster scope',
                kind="nodes",
            ),
            Unavailable,
            "cannot list nodes: system:serviceaccount:falaj:falaj may not list nodes",
        ),
        (
            status(
                403,
                "Forbidden",
                'jobsets.jobset.x-k8s.io is forbidden: User "falaj" cannot create resource "jobsets" in API group '
                '"jobset.x-k8s.io" in the namespace "falaj-risk"',
            ),
            Unavailable,
            "falaj may not create jobsets.jobset.x-k8s.io in namespace falaj-risk",
        ),
        (
            status(
                403,
                "Forbidden",
                'pods "job-1-0" is forbidden: exceeded quota: team, requested: requests.nvidia.com/gpu=8, used: '
                "requests.nvidia.com/gpu=4, limited: requests.nvidia.com/gpu=8",
            ),
            Unavailable,
            "exceeded quota: team, requested: requests.nvidia.com/gpu=8",
        ),
        (
            status(
                403,
                "Forbidden",
                'secrets "x" is forbidden: unable to create new content in namespace falaj '
                "because it is being terminated",
            ),
            Unavailable,
            "the namespace is being deleted; it is made again when it is gone",
        ),
        (
            status(403, "Forbidden", "admission webhook \"vtrainjob.kb.io\" denied: runtime 'x-1' not found"),
            Unavailable,
            "an admission webhook has not seen its TrainingRuntime yet",
        ),
        (
            status(
                403,
                "Forbidden",
                'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request: "x-1" not found: '
                "specified trainingRuntime must be created before the TrainJob is created",
            ),
            Unavailable,
            "an admission webhook has not seen its TrainingRuntime yet",
        ),
        (
            status(403, "Forbidden", 'pods "x" is forbidden: violates PodSecurity "restricted:latest"'),
            Conflict,
            'the cluster does not admit it: pods "x" is forbidden: violates PodSecurity',
        ),
        (status(404, "NotFound", 'nodes "n1" not found'), NotFound, 'nodes "n1" not found'),
        (status(409, "AlreadyExists", 'jobs "x" already exists'), AlreadyExists, "already exists"),
        (status(409, "Conflict", "the object has been modified"), Conflict, "the object has been modified"),
        (
            status(
                422,
                "Invalid",
                "ClusterQueue is invalid",
                causes=[
                    {"field": "spec.cohortName", "message": "Invalid value", "reason": "FieldValueInvalid"}
                ],
            ),
            InvalidInput,
            "spec.cohortName",
        ),
        (
            status(500, "InternalError", 'failed calling webhook "vjob.kb.io": connection refused'),
            Unavailable,
            'failed calling webhook "vjob.kb.io"',
        ),
        ((502, "text/html", b"<html>"), Unavailable, "answered 502 to /api/v1/nodes/n1"),
        ((404, "text/plain; charset=utf-8", b"404 page not found\n"), Unavailable, "does not serve v1"),
    ],
)
def test_refusals_name_what_was_tried_and_the_cause(
    api_server: dict[str, Any], tmp_path: Path, answer: Answer, kind: type[FalajError], words: str
) -> None:
    api_server["answer"] = answer

    found = failure(tmp_path, api_server["url"])

    assert type(found) is kind
    assert found.message.startswith("cannot list nodes: ")
    assert words in str(found)


def test_a_namespace_that_is_gone_is_told_from_a_cluster_that_is_away(
    api_server: dict[str, Any], tmp_path: Path
) -> None:
    config = KubernetesConfig(kubeconfig=kubeconfig(tmp_path, api_server["url"]))
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s", "namespace": "falaj-risk"}}
    api_server["answer"] = status(404, "NotFound", 'namespaces "falaj-risk" not found')

    with (
        closing(ApiCluster(partial(connect, config), home="home")) as cluster,
        pytest.raises(NotFound, match='namespaces "falaj-risk" not found'),  # so that it is made again
    ):
        cluster.create(secret)


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"  # nobody listens

        found = failure(tmp_path, address)

    assert isinstance(found, Unavailable)
    assert found.message.startswith(f"cannot list nodes: the API server {address} cannot be reached: ")


def test_a_program_for_credentials_that_fails_is_reported(api_server: dict[str, Any], tmp_path: Path) -> None:
    program = {"apiVersion": "client.authentication.k8s.io/v1beta1", "command": "/bin/false"}

    found = failure(tmp_path, api_server["url"], user={"exec": program})

    assert isinstance(found, Unavailable)
    assert "the credentials of the kubeconfig cannot be had: Exec /bin/false returned 1" in found.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "not found"),
        ("", ""),
        ("clusters: [", ""),
        ("clusters: []\ncontexts: []\ncurrent-context: away\n", "Context 'away' not found"),
        ("clusters: []\ncontexts: []\n", "No current context"),
        ("clusters: []\ncontexts: [{name: a, context: {cluster: c}}]\ncurrent-context: a\n", "no entry 'c'"),
        (
            "clusters: [{name: c, cluster: {server: http://x}}]\n"
            "contexts: [{name: a, context: {cluster: c}}]\ncurrent-context: a\n",
            "names no user",
        ),
    ],
)
def test_a_kubeconfig_that_is_none_is_a_fault_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("kubeconfig")
    if text is not None:
        path.write_text(text)

    with pytest.raises(ConfigInvalid) as caught:
        connect(KubernetesConfig(kubeconfig=path))

    assert caught.value.faults[0].where == "kubernetes.kubeconfig"
    assert caught.value.faults[0].given == str(path)
    assert words in str(caught.value)


def test_an_unknown_context_is_named(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path, "http://x")

    with pytest.raises(ConfigInvalid, match="context there"):
        connect(KubernetesConfig(kubeconfig=path, context="there"))


def test_without_a_kubeconfig_the_platform_must_be_in_a_pod() -> None:
    with pytest.raises(ConfigInvalid, match="no service account of a pod"):
        connect(KubernetesConfig())


def test_a_context_needs_a_kubeconfig() -> None:
    with pytest.raises(ValueError, match=r"kubernetes\.context names a context"):
        KubernetesConfig(context="prod")


def test_jobs_cannot_read_the_kubeconfig(tmp_path: Path) -> None:
    config = Config(kubernetes=KubernetesConfig(kubeconfig=tmp_path / "kubeconfig"))

    assert tmp_path / "kubeconfig" in secret_files(config)
