"""A platform with the environments of the frameworks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from framework_testbed import FrameworkTestbed
from running_platforms import OWN, running_platform
from virtualenvs import environment


@pytest.fixture
def make_testbed(tmp_path: Path) -> Iterator[Callable[..., FrameworkTestbed]]:
    """Return a function that starts a platform with the named environments, as a user of this machine."""
    with ExitStack() as running:

        def make(*names: str, user: str = OWN) -> FrameworkTestbed:
            lines = [f'{name} = "{environment(name)}"' for name in names]
            toml = "\n".join(["[jobs.environments]", *lines, ""])
            return FrameworkTestbed(
                running.enter_context(running_platform(tmp_path, toml, user=user)), tmp_path
            )

        yield make
