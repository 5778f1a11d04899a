"""The delivery of events to webhooks."""
