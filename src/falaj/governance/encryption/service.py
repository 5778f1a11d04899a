"""The operations on keys: list, rotate, destroy."""

from __future__ import annotations

from sqlalchemy import func, select

from falaj.errors import Conflict
from falaj.governance.encryption.keyring import Keyring
from falaj.governance.operations.call import current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, operation
from falaj.governance.tables import data_keys, objects
from falaj.records.governance.identity import Role
from falaj.records.governance.keys import DataKeyInfo, KeyDestruction, KeyRotation, SigningKeyRotation
from falaj.records.names import ROOT, WorkspaceRef


class Keys:
    """Data keys: one per workspace, wrapped by the root key; and the key that signs model versions."""

    def __init__(self, gate: Gate, keyring: Keyring) -> None:
        self.gate = gate
        self._keyring = keyring

    @operation("keys.list", resource="platform", mode=Mode.READ, allow={Role.ADMIN, Role.AUDITOR})
    def list(self) -> tuple[DataKeyInfo, ...]:
        """List the data keys of every workspace, and the root key that wraps them."""
        query = (
            select(data_keys, objects.c.name)
            .join(objects, objects.c.id == data_keys.c.workspace)
            .order_by(objects.c.name, data_keys.c.version)
        )
        return tuple(
            DataKeyInfo(
                workspace=row["name"],
                version=row["version"],
                root=row["root"],
                created_at=row["created_at"],
                destroyed_at=row["destroyed_at"],
            )
            for row in current_call().tx.execute(query).mappings()
        )

    @operation("keys.rotate", resource="platform", allow=Role.ADMIN)
    def rotate(self) -> KeyRotation:
        """Make a new root key and wrap every data key with it. No blob is rewritten."""
        root, rewrapped = self._keyring.rotate(current_call().tx)
        return KeyRotation(root=root, rewrapped=rewrapped)

    @operation("keys.rotate_signing", resource="platform", allow=Role.ADMIN)
    def rotate_signing(self) -> SigningKeyRotation:
        """Make a new P-256 key, which signs model versions from now on. Earlier keys verify what they signed."""
        return self._keyring.rotate_signing()

    @operation("keys.destroy", resource="workspace", mode=Mode.LATE, allow=Role.ADMIN, confirm=True)
    def destroy(self, workspace: WorkspaceRef) -> KeyDestruction:
        """Destroy a workspace's data keys: nobody can read its blobs again. There is no undo."""
        call = current_call()
        if call.target.id == ROOT:
            raise Conflict("the platform's own key seals the audit inputs and cannot be destroyed")
        gone = self.gate.commit(call, self._destroy)
        self.gate.database.purge_deleted()
        return gone

    def _destroy(self) -> KeyDestruction:
        call = current_call()
        versions = self._keyring.destroy(call.tx, call.target.id, now=call.now)
        if not versions:
            raise Conflict(f"the keys of workspace {call.target.name} are destroyed already")
        kept = select(func.count()).where(objects.c.workspace == call.target.id, objects.c.kind == "blob")
        blobs = int(call.tx.execute(kept).scalar_one())  # after the keys: an upload may have been waited for
        return KeyDestruction(
            workspace=call.target.name, versions=tuple(versions), blobs=blobs, destroyed_at=call.now
        )
