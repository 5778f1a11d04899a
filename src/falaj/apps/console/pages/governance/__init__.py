"""Governance: audit, residency, policies, keys, people, groups, tokens and webhooks."""
