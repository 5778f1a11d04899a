"""Records of governance: identity, policy, audit, lineage, residency, keys, blobs and secrets."""
