"""The checks of the cluster that jobs run on: whether it can be reached, what it offers, and what it enforces."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from falaj.assembly.doctor.findings import DoctorContext, fail, failures, ok, warn
from falaj.errors import FalajError
from falaj.ports.cluster.namespaces import GRANT
from falaj.records.config import KubernetesConfig
from falaj.records.doctor import Finding
from falaj.records.training.images import read_image

if TYPE_CHECKING:
    from falaj.drivers.kubernetes.isolation.examination import ClusterExamination

SHOWN = 6


def check_cluster(context: DoctorContext) -> Iterable[Finding]:
    """The clusters of `[kubernetes]`; nothing where none is configured."""
    config = context.config.kubernetes
    if config is None or find_spec("lightkube") is None:  # the check of the extras says so
        return
    yield from _image(config)
    for name, each in config.each_cluster().items():
        for finding in _check_one(each):
            check = finding.check if name is None else f"{finding.check} of {name}"
            yield finding.model_copy(update={"check": check})


def _check_one(config: KubernetesConfig) -> Iterable[Finding]:
    yield from _agent(config)
    from falaj.drivers.kubernetes.isolation.examination import examine_cluster

    try:
        found = examine_cluster(config)
    except FalajError as error:
        yield from failures("cluster", error)
        return
    yield ok(
        "cluster", f"{found.server} runs {found.version} and serves {', '.join(found.served) or 'Jobs alone'}"
    )
    yield from _kinds(config, found)
    yield from _rights(found)
    yield from _namespaces(config, found)
    yield _policies(found)


def _kinds(config: KubernetesConfig, found: ClusterExamination) -> Iterator[Finding]:
    wanted = {"jobset": "JobSet", "trainjob": "TrainJob"}.get(config.objects)
    if wanted is not None and wanted not in found.served:
        words = f"kubernetes.objects is {config.objects}, and the cluster serves no {wanted}"
        yield fail(
            "cluster objects", words, fix=f'install its definitions, or objects = "auto" instead of {wanted}'
        )
    if config.scheduler == "kueue" and "Kueue" not in found.served:
        yield fail(
            "cluster objects",
            "kubernetes.scheduler is kueue, and the cluster serves no Kueue",
            fix='install Kueue, or scheduler = "falaj"',
        )


def _rights(found: ClusterExamination) -> Iterator[Finding]:
    if found.missing:
        more = f" and {len(found.missing) - SHOWN} more" if len(found.missing) > SHOWN else ""
        listed = ", ".join(found.missing[:SHOWN])
        yield fail("cluster rights", f"the platform's account may not {listed}{more}", fix=GRANT)
    if found.unasked:
        words = f"{found.unasked} of {found.asked + found.unasked} rights were not asked for: the API server is slow"
        yield warn("cluster rights", words, fix="falaj doctor again, or kubectl get --raw /readyz?verbose")
    if not found.missing and not found.unasked:
        yield ok("cluster rights", f"the platform's account has all {found.asked} that were asked for")


def _namespaces(config: KubernetesConfig, found: ClusterExamination) -> Iterator[Finding]:
    if not found.namespaces:
        how = "falaj clusters apply makes them" if config.namespaces == "create" else GRANT
        yield ok("cluster namespaces", f"no workspace has one yet; the first job or {how}")
        return
    open_ones = [each.name for each in found.namespaces if each.enforces != "restricted"]
    if open_ones:
        words = f"{', '.join(open_ones[:SHOWN])} do not enforce the Pod Security Standard restricted"
        yield fail("cluster namespaces", words, fix="falaj clusters apply")
    else:
        count = len(found.namespaces)
        yield ok(
            "cluster namespaces", f"{count} of workspaces, which enforce the Pod Security Standard restricted"
        )


def _policies(found: ClusterExamination) -> Finding:
    if found.policy_engine is not None:
        return ok("cluster network", f"NetworkPolicy is enforced by {found.policy_engine}")
    unseen = (
        "" if found.sees_daemons else " (the account may not list DaemonSets, by which more are recognized)"
    )
    words = f"NetworkPolicy is not known to be enforced{unseen}: jobs may reach each other and the network"
    fix = "use a network plugin that enforces it, such as Cilium or Calico; see the reference of Kubernetes"
    return warn("cluster network", words, fix=fix)


def _agent(config: KubernetesConfig) -> Iterator[Finding]:
    """Whether pods can plausibly reach the controller at `agent_url`."""
    seen = config.agent_as_seen
    if seen is None:
        return
    fix = '[kubernetes] agent_url = "tls://ADDRESS:PORT", an address of this machine that pods reach'
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(seen[0], seen[1])}
    except OSError as error:
        if seen[0].endswith((".svc", ".svc.cluster.local")):
            yield ok("agent", f"{config.agent_url} is a Service of the cluster")
            return
        yield warn("agent", f"{config.agent_url} has no address here ({error}); pods may see one", fix=fix)
        return
    wrong = [each for each in sorted(addresses) if _is_unreachable(each)]
    if wrong:
        yield fail("agent", f"{config.agent_url} leads to {', '.join(wrong)}, which no pod reaches", fix=fix)
    elif _is_unreachable(config.agent_address[0], may_be_any=True):
        words = f"the controller listens at {config.agent} only, which no pod reaches"
        yield fail("agent", words, fix='[kubernetes] agent = "0.0.0.0:7482"')
    else:
        yield ok("agent", f"pods find the controller at {config.agent_url}")


def _is_unreachable(host: str, *, may_be_any: bool = False) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost"
    is_any = address.is_unspecified and not may_be_any
    return address.is_loopback or address.is_link_local or address.is_multicast or is_any


def _image(config: KubernetesConfig) -> Iterator[Finding]:
    """Whether the image is the same tomorrow."""
    if config.image is None:
        return
    try:
        digest = read_image(config.image).digest
    except ValueError as error:
        yield fail("image", f"{config.image} is no image: allowed is {error}")
        return
    if digest is None:
        words = f"{config.image} has no digest: whoever moves its tag changes what runs"
        yield warn("image", words, fix='[kubernetes] image = "REPOSITORY@sha256:…"')
    else:
        yield ok("image", f"{config.image} is pinned by its digest")
