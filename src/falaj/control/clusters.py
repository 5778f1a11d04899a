"""Operations on the clusters that jobs run on: what their administrators apply, and the namespaces of workspaces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from falaj.errors import ConfigInvalid, InvalidInput, NotFound, Unavailable
from falaj.governance.operations.call import current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, operation
from falaj.ports.cluster.namespaces import ClusterNamespaces, Tenant
from falaj.ports.metadata import Database
from falaj.records.governance.identity import Role
from falaj.records.names import Name
from falaj.records.scheduling.cluster_names import namespace_of
from falaj.records.scheduling.clusters import ClusterManifests, ClusterNamespaceSync, NamespaceState
from falaj.scheduling.service import all_workspaces
from falaj.scheduling.store import all_queues
from falaj.scheduling.workspace_limits import workspace_limits


class Clusters:
    """The clusters that jobs run on, as their administrators see them."""

    def __init__(
        self, gate: Gate, namespaces: Mapping[str | None, ClusterNamespaces], *, prefix: str
    ) -> None:
        """`namespaces` are by cluster; the only one has no name. `prefix` begins their names."""
        self.gate = gate
        self._known = namespaces
        self._prefix = prefix

    @operation("clusters.render", resource="platform", mode=Mode.FREE, allow=Role.OPERATOR)
    def render(self, *, cluster: Name | None = None) -> ClusterManifests:
        """Return what an administrator applies before the first job: the platform's account, its rights and namespaces.

        The cluster is not asked. Namespaces are among them if the platform is not to make them itself. Of several
        clusters, `cluster` names one.
        """
        chosen = self._chosen(cluster)
        if len(chosen) > 1:
            raise InvalidInput.at(
                "cluster",
                given="none",
                allowed=f"one of {', '.join(map(str, chosen))}: each has its own",
                fix=f"falaj clusters render --cluster {next(iter(chosen))}",
            )
        made = next(iter(chosen.values())).render(tenants(self.gate.database))
        return ClusterManifests(manifests=tuple(dict(each) for each in made))

    @operation("clusters.apply", resource="platform", mode=Mode.LATE, allow=Role.OPERATOR)
    def apply(self, *, cluster: Name | None = None) -> ClusterNamespaceSync:
        """Make the namespaces of all workspaces as they are to be: labels, network policies, quotas.

        None is deleted: those of workspaces that are not there any more are named. Of several clusters all are
        changed, unless `cluster` names one.
        """
        call, wanted = current_call(), tenants(self.gate.database)
        found: list[NamespaceState] = []
        for name, there in self._chosen(cluster).items():
            found += [self._ensure(name, there, tenant) for tenant in wanted]
            found += self._extra(name, there, wanted)
        done = ClusterNamespaceSync(namespaces=tuple(found))
        return self.gate.commit(call, lambda: done)

    def _ensure(self, cluster: str | None, there: ClusterNamespaces, tenant: Tenant) -> NamespaceState:
        state = NamespaceState(
            workspace=tenant.workspace,
            namespace=namespace_of(tenant.workspace, prefix=self._prefix),
            state="kept",
            cluster=cluster,
        )
        try:
            there.ensure(tenant)
        except Unavailable as error:
            return state.model_copy(update={"state": "refused", "reason": error.message})
        return state

    def _extra(
        self, cluster: str | None, there: ClusterNamespaces, wanted: Iterable[Tenant]
    ) -> list[NamespaceState]:
        known = {tenant.workspace for tenant in wanted}
        try:
            existing = there.existing()
        except Unavailable:
            if cluster is None:
                raise
            return []  # one of several does not answer: its namespaces were refused
        return [
            NamespaceState(workspace=workspace, namespace=name, state="extra", cluster=cluster)
            for name, workspace in sorted(existing.items())
            if workspace not in known
        ]

    def _chosen(self, cluster: str | None) -> dict[str | None, ClusterNamespaces]:
        """Return the cluster of a name, or all."""
        if not self._known:
            raise ConfigInvalid.at(
                "kubernetes",
                given="nothing",
                allowed="the cluster that jobs run on",
                fix='[kubernetes] kubeconfig = "kubeconfig.yaml"',
            )
        if cluster is None:
            return dict(self._known)
        if cluster not in self._known:
            known = ", ".join(name for name in self._known if name) or "one without a name"
            raise NotFound(f"there is no cluster {cluster}; the clusters are: {known}")
        return {cluster: self._known[cluster]}


def tenants(database: Database) -> list[Tenant]:
    """Return every workspace with the most that its jobs may hold."""
    with database.read() as tx:
        queues = all_queues(tx)
        return [Tenant(each.name, workspace_limits(each.id, queues)) for each in all_workspaces(tx)]
