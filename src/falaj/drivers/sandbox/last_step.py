"""Restricts its own process as it is told, for good, and then becomes the user's command: the end of every sandbox.

    python -I -S -c TEXT FD

FD holds the plan as JSON: the seccomp filter, the command with its directory and environment, and where no launcher
before it has done so, the rules for Landlock, the uid and the limits. Stand-alone, standard library only: TEXT is this
file, since a sandbox may not show it.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import resource
import signal
import stat
import struct
import sys
from typing import Any

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on every machine
VERSION_FLAG = 1
RULE_PATH_BENEATH, RULE_NET_PORT = 1, 2
FILE_RIGHTS = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
"""Those that a rule for a file may name: execute, write, read, truncate, ioctl. The others are of folders."""

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_SECUREBITS, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 28, 38
SECCOMP_MODE_FILTER = 2
ROOT_GAINS_NOTHING = 0b11  # SECBIT_NOROOT and its lock: uid 0 gets no capabilities by exec
CAPABILITY_VERSION_3 = 0x2008_0522
MOST_CAPABILITIES = 64
COULD_NOT_RESTRICT, COULD_NOT_START = 126, 127

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def landlock_abi() -> int:
    """The version of Landlock that the kernel has; 0 where it has none, or it is switched off or forbidden."""
    return max(0, int(libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(VERSION_FLAG))))


def main(plan: dict[str, Any]) -> None:
    command = plan["command"]
    try:
        restrict(plan)
    except (OSError, ValueError) as error:
        print(f"the sandbox could not be set up: {error}", file=sys.stderr, flush=True)
        os._exit(COULD_NOT_RESTRICT)
    # Python ignores these, and a program started by exec inherits that unless it is undone here.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.chdir(plan["directory"])
        os.execvpe(command[0], command, plan["environment"])  # noqa: S606 - a user's command, not a shell's
    except (OSError, ValueError) as error:
        print(f"{command[0]}: {error}", file=sys.stderr, flush=True)
        os._exit(COULD_NOT_START)


def restrict(plan: dict[str, Any]) -> None:
    """Give up all rights but those of the plan; the filter comes last, since it may refuse what is done before it."""
    if plan["landlock"] is not None:
        restrict_by_landlock(plan["landlock"])
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, *arguments(1, 0, 0, 0)), "no_new_privs")
    if plan["filter"] is not None:
        install_filter(base64.b64decode(plan["filter"]))


def restrict_by_landlock(plan: dict[str, Any]) -> None:
    """Keep to the rules of Landlock. They are made first: the new uid may not reach their paths."""
    ruleset = make_ruleset(plan)
    for name, limit in plan["limits"].items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    drop_rights(plan["uid"])
    die_with(plan["parent"])
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, *arguments(1, 0, 0, 0)), "no_new_privs")
    check(libc.syscall(RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0)), "Landlock")
    os.close(ruleset)


def make_ruleset(plan: dict[str, Any]) -> int:
    """The descriptor of a ruleset that handles what the plan names, and allows what its rules say."""
    attributes = struct.pack("=QQQ", plan["files"], plan["ports"], plan["scopes"])[: plan["size"]]
    ruleset = int(
        libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    )
    check(ruleset, "Landlock")
    for path, rights in plan["path_rules"]:
        allow_path(ruleset, path, rights & plan["files"])
    for first, last, rights in plan["port_rules"]:
        for port in range(first, last + 1):
            add_rule(ruleset, RULE_NET_PORT, struct.pack("=QQ", rights & plan["ports"], port))
    return ruleset


def allow_path(ruleset: int, path: str, rights: int) -> None:
    """Allow `rights` beneath a path, if it is there: without a rule, nothing is allowed."""
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            rights &= FILE_RIGHTS
        add_rule(ruleset, RULE_PATH_BENEATH, struct.pack("=Qi", rights, place))
    finally:
        os.close(place)


def add_rule(ruleset: int, kind: int, rule: bytes) -> None:
    check(
        libc.syscall(ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(kind), rule, ctypes.c_uint(0)),
        "Landlock rule",
    )


def drop_rights(uid: int | None) -> None:
    """Become `uid`, where one is given, and give up every capability; also root's own, which exec would renew."""
    if os.geteuid() == 0:
        for capability in range(MOST_CAPABILITIES):
            libc.prctl(PR_CAPBSET_DROP, *arguments(capability, 0, 0, 0))  # fails beyond the last one
        # This may fail in a container: no_new_privs keeps exec from renewing them, too.
        libc.prctl(PR_SET_SECUREBITS, *arguments(ROOT_GAINS_NOTHING, 0, 0, 0))
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    check(libc.capset(header, bytes(24)), "capabilities")


def die_with(parent: int) -> None:
    """Be killed when the thread that started us ends; at once, if it has ended before we could ask for that."""
    check(libc.prctl(PR_SET_PDEATHSIG, *arguments(signal.SIGKILL, 0, 0, 0)), "pdeathsig")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def install_filter(program: bytes) -> None:
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HP", len(program) // 8, ctypes.addressof(instructions))
    check(
        libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), header, *arguments(0, 0)),
        "seccomp filter",
    )


def arguments(*values: int) -> list[ctypes.c_ulong]:
    return [ctypes.c_ulong(value) for value in values]


def check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def receive(number: int) -> dict[str, Any]:
    with open(number, encoding="ascii") as file:
        plan: dict[str, Any] = json.load(file)
    return plan


if __name__ == "__main__":
    main(receive(int(sys.argv[1])))
