"""The built-in roles: what each includes, and the Cedar rules that grant them."""

from __future__ import annotations

from collections.abc import Iterable

from falaj.governance.operations.operation import Grantee
from falaj.records.governance.identity import Role
from falaj.records.names import ROOT

INCLUDES: dict[Role, frozenset[Role]] = {
    Role.VIEWER: frozenset({Role.VIEWER}),
    Role.DEVELOPER: frozenset({Role.VIEWER, Role.DEVELOPER}),
    Role.APPROVER: frozenset({Role.VIEWER, Role.APPROVER}),
    Role.OPERATOR: frozenset({Role.VIEWER, Role.DEVELOPER, Role.OPERATOR}),
    Role.AUDITOR: frozenset({Role.VIEWER, Role.AUDITOR}),
    Role.ADMIN: frozenset({Role.VIEWER, Role.DEVELOPER, Role.OPERATOR, Role.ADMIN}),
}
"""A role may do what the roles it includes may do. Approval and audit stay apart: not even an administrator has them
unless they are granted."""


def roles_allowed(allow: Iterable[Grantee]) -> tuple[Role, ...]:
    """The roles that may perform an operation which names `allow`."""
    wanted = set(allow)
    return tuple(role for role in Role if INCLUDES[role] & wanted)


GOVERNING = "governing"
"""The actions by which the platform is kept in hand: no workspace's policy takes them from its administrators and
auditors."""

_GOVERNING_GROUPS = frozenset(
    {"policies", "workspaces", "audit", "keys", "objects", "users", "groups", "tokens", "lineage", "zones"}
)


def is_governing(action: str) -> bool:
    return action.partition(".")[0] in _GOVERNING_GROUPS


def action_groups(allow: Iterable[Grantee]) -> list[str]:
    """The Cedar action groups that an operation belongs to."""
    special = [grantee for grantee in allow if not isinstance(grantee, Role)]
    return [*roles_allowed(allow), *sorted(special)]


def role_entity(workspace: str, role: str) -> str:
    return f"{workspace}/{role}"


def _rule(role: Role) -> str:
    return (
        f'@id("role.{role}")\n'
        f'permit (principal, action in Action::"{role}", resource)\n'
        f"when {{ principal in resource.workspace.{role} ||"
        f' principal in Role::"{role_entity(ROOT, role)}" }};\n'
    )


BUILT_IN = "\n".join(
    [
        *(_rule(role) for role in Role),
        '@id("anyone")\npermit (principal, action in Action::"anyone", resource);\n',
        *(
            f'@id("directory")\npermit (principal, action == Action::"objects.show", resource is {kind});\n'
            for kind in ("User", "Service", "Group")
        ),
        '@id("owner")\npermit (principal, action in Action::"owner", resource)\n'
        "when { resource.owner == principal.owner };\n",
    ]
)
