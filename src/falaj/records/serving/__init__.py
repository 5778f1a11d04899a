"""Records of serving: endpoints, their settings and lookups, requests, predictions and statistics."""
