"""The demonstration runs the whole loop on every eighth flight, and no process connects beyond the host."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Yield a folder with `printed` and, where strace is installed, `calls`: the network calls of the processes."""
    made = tmp_path_factory.mktemp("demonstration")
    environment = os.environ | {
        "FALAJ_CONFIG_DIR": str(made / "config"),
        "HOME": str(made),
        "NO_COLOR": "1",
        "COLUMNS": "200",
    }
    traced = [*TRACE, f"--output={made / 'calls'}"] if shutil.which("strace") else []
    command = [*traced, sys.executable, str(ROOT / "examples" / "demo.py"), "--every", "8"]
    ran = subprocess.run(command, cwd=made, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (made / "printed").write_text(ran.stdout)
    return made


def test_the_demonstration_prints_every_expected_sentence(folder: Path) -> None:
    printed = (folder / "printed").read_text()

    missing = [sentence for sentence in STORY if sentence not in printed]

    assert missing == [], printed


def test_no_process_looks_up_a_name_or_connects_beyond_loopback(folder: Path) -> None:
    if not (folder / "calls").exists():
        pytest.skip("strace: the package strace is not installed")

    calls = (folder / "calls").read_text(errors="replace").splitlines()

    assert any("127.0.0.1" in call for call in calls), "the trace is empty, so it proves nothing"
    assert [call for call in calls if leaves_host(call)] == []


def test_no_process_leaves_files_of_telemetry_behind(folder: Path) -> None:
    cache = folder / ".cache"

    assert not (cache / "Microsoft").exists()


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
