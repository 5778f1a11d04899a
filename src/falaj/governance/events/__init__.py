"""Events: what was done on the platform, for people to list and for webhooks to receive."""
