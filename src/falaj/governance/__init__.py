"""The walls: gate, identity, policy, audit, lineage, residency, encryption."""
