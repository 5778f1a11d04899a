"""The client of the cluster's API, made from the configuration, and its errors as those of Falaj."""

from __future__ import annotations

import re
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, cast

import httpx2
import yaml
from lightkube import ApiError, Client, KubeConfig, SingleConfig
from lightkube.config.client_adapter import verify_cluster
from lightkube.core.exceptions import ConfigError
from lightkube.core.generic_client import transform_exception
from lightkube.generic_resource import create_global_resource, create_namespaced_resource
from lightkube.models.authorization_v1 import ResourceAttributes, SelfSubjectAccessReviewSpec
from lightkube.resources.authentication_v1 import SelfSubjectReview
from lightkube.resources.authorization_v1 import SelfSubjectAccessReview

from falaj.errors import (
    AlreadyExists,
    ConfigInvalid,
    Conflict,
    FalajError,
    Fault,
    InvalidInput,
    NotFound,
    Unavailable,
    shorten,
)
from falaj.ports.cluster.manifests import ObjectKind
from falaj.ports.cluster.namespaces import GRANT
from falaj.records.config import KubernetesConfig

FIELD_MANAGER = "falaj"
TIMEOUT_S = 10.0
KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]
"""A watch waits for events without a time limit: these end it when the server's machine is gone."""

UNREADABLE = (ConfigError, yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError, OSError)
"""What lightkube raises for a kubeconfig that is not one."""


class WatchableTransport(httpx2.BaseTransport):
    """Remembers the connections of watches: a thread that waits for the next event can then be woken.

    Where the API server refuses the credentials, the kubeconfig is read again, and with new ones the request repeated.
    """

    def __init__(self, config: KubernetesConfig) -> None:
        self._config = config
        self.chosen = _chosen(config)
        self._credentials, self._first_token = _credentials(self.chosen), _token(self.chosen)
        self._open = [_transport(self.chosen)]  # the last one is used, the others have watches
        self._renewal = threading.Lock()
        self._watches: weakref.WeakSet[Any] = weakref.WeakSet()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        presented, response = self._credentials, self._send(request)
        if response.status_code == 401 and self._renew(presented):
            response.close()
            response = self._send(request)
        if response.is_error:
            response.read()  # of a watch it would not be read, and the reason would be lost
        if request.url.params.get("watch") == "true" and "network_stream" in response.extensions:
            self._watches.add(response.extensions["network_stream"])
        return response

    def end_watches(self) -> None:
        for stream in list(self._watches):
            with suppress(OSError, AttributeError):  # it has ended meanwhile
                stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for each in self._open:
            each.close()

    def _send(self, request: httpx2.Request) -> httpx2.Response:
        token = _token(self.chosen)
        if token is not None:
            request.headers["Authorization"] = f"Bearer {token}"
        elif self._first_token is not None:  # which the client presents for ever
            del request.headers["Authorization"]
        return self._open[-1].handle_request(request)

    def _renew(self, refused: object) -> bool:
        """Return whether the kubeconfig has other credentials than those that were refused."""
        with self._renewal:
            with suppress(*UNREADABLE):  # it is being written, or is gone
                found = _chosen(self._config)
                now = _credentials(found)
                if now != self._credentials:
                    self._open.append(_transport(found))
                    self.chosen, self._credentials = found, now
            return self._credentials != refused


def _transport(chosen: SingleConfig) -> httpx2.HTTPTransport:
    if chosen.user is None:
        raise ConfigError(f"context {chosen.context_name} names no user")
    tls = verify_cluster(chosen.cluster, chosen.user, chosen.abs_file, trust_env=False)
    return httpx2.HTTPTransport(verify=tls, socket_options=KEEPALIVE)


def _token(chosen: SingleConfig) -> str | None:
    """Return the token in a kubeconfig; none where it is in a file, which the client itself reads again."""
    user = chosen.user
    return None if user is None or user.token_file is not None else user.token


def _credentials(chosen: SingleConfig) -> object:
    """Return what a kubeconfig presents, to be compared; also what is in files that it names."""
    user = chosen.user
    named = () if user is None else (user.client_cert, user.client_key)
    return user, [None if each is None else Path(chosen.abs_file(each)).read_bytes() for each in named]


class ClusterClient(Client):
    """A client whose watches can be ended by other threads."""

    def __init__(self, config: SingleConfig, transport: WatchableTransport, *, timeout_s: float) -> None:
        super().__init__(
            config=config,
            field_manager=FIELD_MANAGER,
            timeout=httpx2.Timeout(timeout_s),
            trust_env=False,
            transport=transport,
        )
        self._transport = transport

    def end_watches(self) -> None:
        """End all watches of this client; whoever reads one gets an error."""
        self._transport.end_watches()

    def served_groups(self) -> frozenset[str]:
        """Return the API groups that the cluster serves."""
        response = self._client._client.get("apis")  # the library has no call for it
        response.raise_for_status()
        return frozenset(each["name"] for each in response.json()["groups"])

    def server_version(self) -> str:
        """Return the version of the API server."""
        response = self._client._client.get("version")  # the library has no call for it
        response.raise_for_status()
        return str(response.json()["gitVersion"])

    def may(
        self, verb: str, resource: str, *, group: str, namespace: str | None = None, name: str | None = None
    ) -> bool:
        """Return whether this account has a right; in all namespaces where none is named."""
        asked = ResourceAttributes(verb=verb, resource=resource, group=group, namespace=namespace, name=name)
        spec = SelfSubjectAccessReviewSpec(resourceAttributes=asked)
        answer = self.create(SelfSubjectAccessReview(spec=spec))
        return answer.status is not None and answer.status.allowed

    def user_name(self) -> str:
        """Return the name by which the cluster knows this account."""
        answer = self.create(SelfSubjectReview())
        user = answer.status.userInfo if answer.status is not None else None
        return (user.username if user is not None else None) or ""


def connect(config: KubernetesConfig, *, timeout_s: float = TIMEOUT_S) -> ClusterClient:
    """Return a client of the cluster; no request is made yet. Raise ConfigInvalid if the kubeconfig is wrong."""
    try:
        transport = WatchableTransport(config)
        return ClusterClient(transport.chosen, transport, timeout_s=timeout_s)
    except UNREADABLE as error:
        raise _misconfigured(config, error) from error


@cache
def resource_of(kind: ObjectKind) -> type[Any]:
    """Return the resource of a kind, whose objects are plain mappings. The client takes each kind only once."""
    make = create_namespaced_resource if kind.namespaced else create_global_resource
    return cast(type[Any], make(kind.group, kind.version, kind.kind, kind.plural))


def _chosen(config: KubernetesConfig) -> SingleConfig:
    if config.kubeconfig is None:
        found = KubeConfig.from_service_account().get()
    else:
        found = KubeConfig.from_file(config.kubeconfig).get(config.context)
    if found is None:
        raise ConfigError("it has no current context")
    return found


def _misconfigured(config: KubernetesConfig, error: Exception) -> ConfigInvalid:
    if config.kubeconfig is None:
        return ConfigInvalid.at(
            "kubernetes.kubeconfig",
            given="nothing, and this process has no service account of a pod",
            allowed="the kubeconfig file of the cluster; none only in a pod of the cluster",
            fix='[kubernetes] kubeconfig = "kubeconfig.yaml"',
        )
    missing = f"no entry {error}" if isinstance(error, KeyError) else str(error)
    named = f"context {config.context} of {config.kubeconfig}" if config.context else str(config.kubeconfig)
    return ConfigInvalid.at(
        "kubernetes.kubeconfig",
        given=named,
        allowed=f"a kubeconfig with server and credentials ({shorten(missing, limit=200)})",
        fix="kubectl config view --flatten --minify > FILE",
    )


# ------------------------------------------------------------------------------------------------- errors


@contextmanager
def translated(action: str) -> Iterator[None]:
    """Raise errors of the client inside as those of Falaj. `action` is what was tried, like "list nodes"."""
    try:
        yield
    except (httpx2.HTTPError, ConfigError, OSError) as error:
        raise translate(error, action) from error


def translate(error: Exception, action: str) -> FalajError:
    """Return the error of Falaj for one of the client: it names what was tried, the object and the cause."""
    if isinstance(error, httpx2.HTTPStatusError):
        with suppress(KeyError, ValueError, TypeError):  # it is no answer of the API server
            answer = transform_exception(error)  # a watch leaves it as it is
            if isinstance(answer, ApiError):
                return _refused(answer, action)
        return _not_from_the_api(error, action)
    if isinstance(error, ConfigError):
        return Unavailable(
            f"cannot {action}: the credentials of the kubeconfig cannot be had: {shorten(str(error), limit=300)}"
        )
    server = _server(error)
    if isinstance(error, httpx2.TimeoutException):
        return Unavailable(f"cannot {action}: {server} does not answer in time")
    return Unavailable(f"cannot {action}: {server} cannot be reached: {shorten(str(error), limit=300)}")


REFUSALS: dict[int, type[FalajError]] = {404: NotFound, 409: Conflict, 400: InvalidInput, 422: InvalidInput}
"""The errors for the API server's answers; all others mean that it is unavailable."""


def _refused(error: ApiError, action: str) -> FalajError:
    """Return the error for an answer of the API server itself."""
    status = error.status
    said = shorten(status.message or status.reason or "no reason given", limit=500)
    if status.code == 401:
        return Unavailable(
            f"cannot {action}: {_server(error)} does not accept the credentials of the platform; "
            "they have expired or were revoked: renew the kubeconfig, or the token of the service account"
        )
    if status.code == 403:
        return _forbidden(said, action)
    if status.reason == "AlreadyExists":
        return AlreadyExists(f"cannot {action}: {said}")
    made = REFUSALS.get(status.code or 0, Unavailable)
    return made(f"cannot {action}: {said}", faults=_causes(error))


def _causes(error: ApiError) -> list[Fault]:
    details = error.status.details
    return [
        Fault(where=cause.field or "object", allowed=shorten(cause.message or "", limit=300))
        for cause in ((details.causes if details is not None else None) or [])
    ]


RBAC = re.compile(
    r'User "(?P<user>[^"]*)" cannot (?P<verb>\w+) resource "(?P<resource>[^"]*)" '
    r'in API group "(?P<group>[^"]*)"(?: in the namespace "(?P<namespace>[^"]*)")?'
)


UNSEEN_RUNTIME = re.compile(
    r"runtime '[^']*' not found|specified (?:cluster)?trainingRuntime must be created before", re.IGNORECASE
)
"""How Kueue and Trainer refuse a TrainJob while their caches are behind the API server."""


def _forbidden(said: str, action: str) -> FalajError:
    """Return the error for missing rights, an exhausted quota, or another refusal of admission."""
    if found := RBAC.search(said):
        resource = ".".join(filter(None, (found["resource"], found["group"])))
        where = f" in namespace {found['namespace']}" if found["namespace"] else ""
        return missing_right(f"{found['verb']} {resource}{where}", user=found["user"], action=action)
    if "is attempting to grant RBAC permissions not currently held" in said:
        return missing_right(
            "bind clusterroles.rbac.authorization.k8s.io", user="the platform", action=action
        )
    if "because it is being terminated" in said:
        return Unavailable(
            f"cannot {action}: the namespace is being deleted; it is made again when it is gone"
        )
    if quota := re.search(r"exceeded quota: .*", said):
        return Unavailable(f"cannot {action}: {quota[0]}")
    if UNSEEN_RUNTIME.search(said):
        return Unavailable(
            f"cannot {action}: an admission webhook has not seen its TrainingRuntime yet: {said}"
        )
    return Conflict(f"cannot {action}: the cluster does not admit it: {said}")


def missing_right(right: str, *, user: str, action: str) -> Unavailable:
    """Return the error for a right that the platform's account does not have."""
    return Unavailable(
        f"cannot {action}: {user} may not {right}; an administrator grants it by {GRANT}",
        faults=[
            Fault(
                where=right,
                given=f"no right of {user}",
                allowed="a Role or ClusterRole that grants it, bound to the platform's account",
                fix=GRANT,
            )
        ],
    )


def _not_from_the_api(error: httpx2.HTTPStatusError, action: str) -> FalajError:
    """Return the error for an answer without a Status: a kind that is not served, or a proxy in between."""
    path = error.request.url.path
    served = re.match(r".*/apis?/(?P<version>(?:[^/]+\.[^/]+/|batch/|apps/)?v[^/]+)/", path)
    if error.response.status_code == 404 and served:
        return Unavailable(
            f"cannot {action}: the cluster does not serve {served['version']}; "
            "install the definitions (CRDs) of the project that it belongs to"
        )
    return Unavailable(f"cannot {action}: {_server(error)} answered {error.response.status_code} to {path}")


def _server(error: Any) -> str:
    try:
        url = error.request.url
    except (AttributeError, RuntimeError):  # httpx raises RuntimeError where no request was made
        return "the API server"
    return f"the API server {url.scheme}://{url.netloc.decode()}"
