"""How many files and connections a process of the platform may have open."""

from __future__ import annotations

import resource


def raise_file_limit(enough: int | None = None) -> None:
    """As many open files as the machine allows, or as are `enough` for a process that starts others: each connection is
    one, and so much is inherited."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if enough is not None:
        most = enough if hard == resource.RLIM_INFINITY else min(enough, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
