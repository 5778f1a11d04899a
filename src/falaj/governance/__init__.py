"""Governance: the gate, identity, policy, audit, lineage, residency and encryption that every service goes through."""
