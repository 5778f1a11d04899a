"""The demonstration runs the whole loop on every eighth flight, its console shows it, and nothing leaves the host."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import falaj as fj
from console_pictures import THEMES, ConsoleWalk, documented_pictures, page_paths
from polling import eventually
from processes import children

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"http://\S+/#code=\S+")
STORY = [
    "16,701 rows, 27 columns",
    "refused [policy.denied] champion of flight-delays is protected",
    "flight-delays@1 is champion, approved by sara",
    "flight-delays@1, Pareto table",
    "flight-delays@2 int8: refused. trees only compare and add",
    "recommended: CPU, ",
    "AED a million predictions; no GPU was measured",
    "columns drift: weather__temp",
    "verdict: promoted",
    "rolled back: it is worse",
    "all requests go to version ",
    "model_version flight-delays@",
    "view weather",
    "refused [residency.denied]",
    "→ view:flights → dataset:jan-may",
    "sound: ",
    "was edited",
    "the whole demonstration",
]
"""Sentences that the demonstration must print, in any order."""

TRACE = ["strace", "--follow-forks", "--seccomp-bpf", "-qq", "--signal=none", "--string-limit=120"]
TRACE += ["--trace=connect,sendto,sendmsg,sendmmsg"]
DNS_PORT = 53
RESOLVERS = ("/run/systemd/resolve", "/run/dbus", "/var/run/dbus", "/run/avahi-daemon")
"""Unix sockets of name services."""

pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow]


@dataclass
class KeptDemonstration:
    """The demonstration, at its end: its platform and console run until it is stopped, as with `make demo KEEP=1`."""

    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def printed(self) -> str:
        return (self.folder / "printed").read_text()

    @property
    def link(self) -> str:
        """The address of the console that it prints; it signs in once."""
        found = LINK.search(self.printed)
        assert found, self.printed
        return found[0]

    @property
    def homes(self) -> list[Path]:
        return [*(self.folder / "tmp").glob("falaj-demo-*/home")]

    @contextmanager
    def connected(self) -> Iterator[fj.Platform]:
        """Yield its platform, as its owner."""
        (home,) = self.homes
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FALAJ_CONFIG_DIR", str(home.parent / "config"))
            with fj.connect(json.loads((home / "run.json").read_text())["url"]) as platform:
                yield platform

    def stop(self) -> int:
        """Press Ctrl-C, unless that was done; return the exit code."""
        if self.process.poll() is None:
            traced = children(self.process.pid, "demo.py")
            os.kill(traced[0] if traced else self.process.pid, signal.SIGINT)
        return self.process.wait()


@pytest.fixture(scope="module")
def demonstration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeptDemonstration]:
    """Run the demonstration to its end; where strace is installed, `calls` has the network calls of the processes."""
    folder = tmp_path_factory.mktemp("demonstration")
    (folder / "tmp").mkdir()
    environment = os.environ | {
        "FALAJ_CONFIG_DIR": str(folder / "config"),
        "FALAJ_CONSOLE": "on",
        "HOME": str(folder),
        "TMPDIR": str(folder / "tmp"),
        "NO_COLOR": "1",
        "COLUMNS": "200",
    }
    traced = [*TRACE, f"--output={folder / 'calls'}"] if shutil.which("strace") else []
    command = [*traced, sys.executable, str(ROOT / "examples" / "demo.py"), "--every", "8", "--keep"]
    with (
        (folder / "printed").open("w") as out,
        subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out) as process,
    ):
        kept = KeptDemonstration(folder, process)
        try:
            while process.poll() is None and not LINK.search(kept.printed):
                before = kept.printed
                eventually(lambda: process.poll() is not None or kept.printed != before)  # noqa: B023
            assert kept.link
            yield kept
        finally:
            kept.stop()


def test_every_page_of_the_console_shows_the_demonstration(
    demonstration: KeptDemonstration, browser: Browser
) -> None:
    console, _, code = demonstration.link.partition("/#")
    with demonstration.connected() as platform:
        paths = page_paths(platform)
    walk = ConsoleWalk(browser, console)
    walk.page.goto("/signin")
    walk.take_pictures("sign-in")

    walk.page.goto(f"/#{code}")
    walk.page.wait_for_selector(".layers")
    walk.page.keyboard.press("Control+k")
    walk.page.get_by_label("Search", exact=True).fill("delays")
    walk.page.locator(".hit", has_text="flight-delays").first.wait_for()
    walk.take_pictures("search", widths=["wide"])
    for theme in THEMES:
        walk.use(theme)
        for name, path in paths.items():
            for tab, link in walk.visit(name, path).items():
                walk.visit(tab, link)

    assert walk.problems == []
    assert documented_pictures() <= walk.seen


def test_the_demonstration_prints_every_expected_sentence(demonstration: KeptDemonstration) -> None:
    printed = demonstration.printed

    missing = [sentence for sentence in STORY if sentence not in printed]

    assert missing == [], printed


def test_ctrl_c_stops_the_platform_and_removes_its_home(demonstration: KeptDemonstration) -> None:
    assert demonstration.stop() == 0

    assert demonstration.homes == []


def test_no_process_looks_up_a_name_or_connects_beyond_loopback(demonstration: KeptDemonstration) -> None:
    calls_file = demonstration.folder / "calls"
    if not shutil.which("strace"):
        pytest.skip("strace: the package strace is not installed")
    demonstration.stop()

    calls = calls_file.read_text(errors="replace").splitlines()

    assert any("127.0.0.1" in call for call in calls), "the trace is empty, so it proves nothing"
    assert [call for call in calls if leaves_host(call)] == []


def test_no_process_leaves_files_of_telemetry_behind(demonstration: KeptDemonstration) -> None:
    demonstration.stop()

    assert not (demonstration.folder / ".cache" / "Microsoft").exists()


def leaves_host(call: str) -> bool:
    """Return whether a line of strace names an address beyond loopback, or a name service."""
    for address in re.findall(r'inet_addr\("([^"]+)"\)|inet_pton\(AF_INET6, "([^"]+)"', call):
        found = ipaddress.ip_address(address[0] or address[1])
        plain = getattr(found, "ipv4_mapped", None) or found
        if not plain.is_loopback and not plain.is_unspecified:
            return True
    if re.search(rf"sin6?_port=htons\({DNS_PORT}\)", call):
        return True
    return any(f'sun_path="{path}' in call for path in RESOLVERS)


@pytest.mark.parametrize(
    ("call", "leaves"),
    [
        (
            '1 connect(3, {sa_family=AF_INET, sin_port=htons(443), sin_addr=inet_addr("10.1.2.3")}, 16) = 0',
            True,
        ),
        (
            '1 connect(3, {sa_family=AF_INET, sin_port=htons(53), sin_addr=inet_addr("127.0.0.53")}, 16) = 0',
            True,
        ),
        (
            '1 connect(3, {sa_family=AF_INET, sin_port=htons(80), sin_addr=inet_addr("127.0.0.1")}, 16) = 0',
            False,
        ),
        (
            '1 sendto(3, "a", 1, 0, {sa_family=AF_INET6, sin6_port=htons(9), inet_pton(AF_INET6, "fe80::1"',
            True,
        ),
        (
            '1 connect(3, {sa_family=AF_INET6, sin6_port=htons(80), inet_pton(AF_INET6, "::1", &sin6_addr)}',
            False,
        ),
        (
            '1 connect(3, {sa_family=AF_INET6, inet_pton(AF_INET6, "::ffff:127.0.0.1", &sin6_addr)}, 28)',
            False,
        ),
        ('1 connect(3, {sa_family=AF_UNIX, sun_path="/run/systemd/resolve/io.systemd.Resolve"}, 42)', True),
        ('1 connect(3, {sa_family=AF_UNIX, sun_path="/tmp/agent.sock"}, 42) = 0', False),
    ],
)
def test_trace_lines_are_classified_by_address(call: str, *, leaves: bool) -> None:
    assert leaves_host(call) is leaves
