"""The limit on open files is raised as far as a platform process needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource
from falaj.apps.process_setup import raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 2048))
raise_file_limit({enough})
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("enough", "limits"), [(None, "2048 2048"), (512, "512 2048"), (100, "256 2048"), (9999, "2048 2048")]
)
def test_the_open_file_limit_is_raised_as_far_as_needed_and_allowed(enough: int | None, limits: str) -> None:
    script = SCRIPT.format(enough=enough)

    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert ran.stdout.strip() == limits
