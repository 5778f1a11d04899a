"""Monitoring: monitors and alerts, and one monitor with its drift over time."""
