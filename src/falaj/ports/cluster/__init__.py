"""The ports to a cluster that the platform shares with its administrators."""
