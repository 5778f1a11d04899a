"""Monitoring: drift of endpoints from their training sets, and alerts."""
