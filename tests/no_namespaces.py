"""Runs a command as in an ordinary Docker container: no new namespaces, no mounts, and few capabilities."""

from __future__ import annotations

import ctypes
import errno
import os
import sys

from falaj.drivers.sandbox import last_step, seccomp

# fmt: off
FORBIDDEN = (
    "fsconfig", "fsmount", "fsopen", "fspick", "mount", "mount_setattr", "move_mount", "open_tree", "pidfd_getfd",
    "pivot_root", "setns", "umount2",
)
# fmt: on
DOCKER_CAPABILITIES = {0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31}
"""CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE, NET_RAW, SYS_CHROOT, MKNOD,
AUDIT_WRITE, SETFCAP."""


def main(command: list[str]) -> None:
    """Drop capabilities and run the command; `--no-landlock` simulates an old kernel."""
    forbidden = [*FORBIDDEN]
    if command[0] == "--no-landlock":
        command = command[1:]
        forbidden.append("landlock_create_ruleset")
    rules = [seccomp.SyscallRule(name, errno.EPERM) for name in forbidden] + seccomp.namespace_rules()
    program = seccomp.encode(seccomp.assemble(rules, machine=os.uname().machine))
    if os.geteuid() != 0:
        last_step.libc.prctl(last_step.PR_SET_NO_NEW_PRIVS, *last_step.arguments(1, 0, 0, 0))
    last_step.install_filter(program)
    if os.geteuid() == 0:
        for capability in set(range(last_step.MOST_CAPABILITIES)) - DOCKER_CAPABILITIES:
            last_step.libc.prctl(
                last_step.PR_CAPBSET_DROP, *(ctypes.c_ulong(each) for each in (capability, 0, 0, 0))
            )
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
