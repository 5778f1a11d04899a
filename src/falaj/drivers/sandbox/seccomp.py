"""Assembles the seccomp filter of a job: a classic BPF program that decides by the number and arguments of a call.

In every sandbox it refuses the parts of the kernel that no job needs and that no namespace keeps apart: other address
families, new namespaces, io_uring, keys, BPF (decision 0016). Under Landlock, which has no namespaces, also tracing and
changes of the platform's processes. The first rule that matches a call decides; a call that no rule matches is allowed.
"""

from __future__ import annotations

import errno
import os
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from falaj.ports.sandbox import Gap

ARCHITECTURES: Mapping[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH of the machines whose system calls are known here."""

X32 = 0x4000_0000
"""The bit that marks a call of the x32 ABI, which has the same AUDIT_ARCH as x86_64."""

SYSCALLS: Mapping[str, tuple[int | None, int | None]] = {
    # name: (x86_64, aarch64)
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chmod": (90, None),
    "chown": (92, None),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "clone": (56, 220),
    "clone3": (435, 435),
    "creat": (85, None),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "file_setattr": (469, 469),
    "finit_module": (313, 273),
    "fork": (57, None),
    "fremovexattr": (199, 16),
    "fsconfig": (431, 431),
    "fsetxattr": (190, 7),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "futimesat": (261, None),
    "init_module": (175, 105),
    "inotify_add_watch": (254, 27),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioctl": (16, 29),
    "ioperm": (173, None),
    "iopl": (172, None),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "kill": (62, 129),
    "landlock_create_ruleset": (444, 444),
    "lchown": (94, None),
    "lookup_dcookie": (212, 18),
    "lremovexattr": (198, 15),
    "lsetxattr": (189, 6),
    "migrate_pages": (256, 238),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "msgctl": (71, 187),
    "msgget": (68, 186),
    "msgrcv": (70, 188),
    "msgsnd": (69, 189),
    "name_to_handle_at": (303, 264),
    "open": (2, None),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "openat": (257, 56),
    "openat2": (437, 437),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "prlimit64": (302, 261),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "removexattr": (197, 14),
    "removexattrat": (466, 466),
    "request_key": (249, 218),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "semctl": (66, 191),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "sendmmsg": (307, 269),
    "sendmsg": (46, 211),
    "sendto": (44, 206),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "setpriority": (141, 140),
    "settimeofday": (164, 170),
    "setxattr": (188, 5),
    "setxattrat": (463, 463),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmdt": (67, 197),
    "shmget": (29, 194),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "truncate": (76, 45),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "uselib": (134, None),
    "userfaultfd": (323, 282),
    "utime": (132, None),
    "utimensat": (280, 88),
    "utimes": (235, None),
    "vfork": (58, None),
    "vhangup": (153, 58),
}

# fmt: off
KERNEL = (
    # The kernel itself, its clock, keys and tracing.
    "acct", "add_key", "adjtimex", "bpf", "clock_adjtime", "clock_settime", "delete_module", "finit_module",
    "init_module", "ioperm", "iopl", "kexec_file_load", "kexec_load", "keyctl", "lookup_dcookie", "perf_event_open",
    "quotactl", "quotactl_fd", "reboot", "request_key", "setdomainname", "sethostname", "settimeofday", "swapoff",
    "swapon", "syslog", "uselib", "userfaultfd", "vhangup",
    # The file tree, and files by another way than their path.
    "chroot", "fanotify_init", "fanotify_mark", "fsconfig", "fsmount", "fsopen", "fspick", "mount", "mount_setattr",
    "move_mount", "name_to_handle_at", "open_by_handle_at", "open_tree", "open_tree_attr", "pivot_root", "setns",
    "umount2",
    # Calls that no filter sees.
    "io_uring_enter", "io_uring_register", "io_uring_setup",
)
"""Refused in every sandbox."""
SHARED = (
    # Other processes.
    "kcmp", "migrate_pages", "move_pages", "pidfd_getfd", "process_madvise", "process_mrelease", "process_vm_readv",
    "process_vm_writev", "ptrace",
    # System V and POSIX queues, semaphores and memory: they are not files, so Landlock does not see them.
    "mq_open", "mq_unlink", "msgctl", "msgget", "msgrcv", "msgsnd", "semctl", "semget", "semop", "semtimedop",
    "shmat", "shmctl", "shmdt", "shmget",
    # Changes in folders that the job may not read.
    "inotify_add_watch",
)
"""Refused where the job shares the machine's processes and files with others, with nothing but Landlock between."""
NO_EFFECT = (
    "chmod", "chown", "fchmod", "fchmodat", "fchmodat2", "fchown", "fchownat", "futimesat", "lchown", "utime",
    "utimes",
)
EXTENDED_ATTRIBUTES = (
    "file_setattr", "fremovexattr", "fsetxattr", "lremovexattr", "lsetxattr", "removexattr", "removexattrat",
    "setxattr", "setxattrat",
)
# fmt: on

NEW_NAMESPACES = 0x7E02_0000
CLONE_THREAD = 0x1_0000
NEW_TIME_NAMESPACE = 0x80
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
SOCK_STREAM, SOCK_DGRAM, SOCK_TYPE_MASK = 1, 2, 0xF
NETLINK_ROUTE = 0
ANY_TCP = (0, 6)  # IPPROTO_IP, IPPROTO_TCP: Landlock does not govern MPTCP and SCTP
MSG_FASTOPEN = 0x2000_0000
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
PRIO_USER, IOPRIO_WHO_USER = 2, 3
O_ACCMODE, O_CREAT, O_TRUNC, O_TMPFILE = 0x3, 0x40, 0x200, 0x40_0000
SETUID_SETGID = 0o6000
EVERYBODY = 0xFFFF_FFFF  # kill(-1)
PERSONALITIES = (
    0,
    0x4_0000,
    0xFFFF_FFFF,
)  # the usual one, without random addresses as debuggers want it, and a query
WHOLE = 0xFFFF_FFFF


class ArgumentTest(NamedTuple):
    """Whether one half of an argument, under `mask`, is `value`, or is not; the kernel reads most in the lower one."""

    argument: int
    value: int
    mask: int = WHOLE
    is_equal: bool = True
    is_upper: bool = False


class SyscallRule(NamedTuple):
    """What becomes of `syscall` where all `tests` hold: the error, 0 for success without effect, None to allow it."""

    syscall: str
    error: int | None
    tests: tuple[ArgumentTest, ...] = ()


class Instruction(NamedTuple):
    """One instruction of classic BPF; a jump is counted from the next one."""

    code: int
    jump_true: int
    jump_false: int
    value: int


LOAD, AND, JUMP_EQUAL, JUMP_SET, RETURN = 0x20, 0x54, 0x15, 0x45, 0x06
ALLOW, KILL, ERROR = 0x7FFF_0000, 0x8000_0000, 0x0005_0000
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16
FARTHEST_JUMP = 255


def is_known(machine: str | None = None) -> bool:
    """Whether the system calls of a machine are known, by default of this one: else there is no filter."""
    return (os.uname().machine if machine is None else machine) in ARCHITECTURES


def program(found: Sequence[SyscallRule]) -> bytes | None:
    """The program for this machine, as the kernel reads it; none where its system calls are not known."""
    return encode(assemble(found, machine=os.uname().machine)) if is_known() else None


def kernel_gaps() -> tuple[Gap, ...]:
    """What a sandbox does not keep without a filter."""
    if is_known():
        return ()
    sentence = "a job can use io_uring, keys, new namespaces and every address family, vsock included"
    return (Gap("kernel", f"the system calls of {os.uname().machine} are not known: {sentence}"),)


def kernel_rules(*, network: bool, loopback: bool) -> list[SyscallRule]:
    """The rules of every sandbox: `network` also where the job has a network namespace of its own."""
    found = [SyscallRule(name, errno.EPERM) for name in KERNEL]
    found += namespace_rules()
    found += socket_rules(network=network, loopback=loopback)
    found += [SyscallRule("personality", None, (ArgumentTest(0, kind),)) for kind in PERSONALITIES]
    found.append(SyscallRule("personality", errno.EPERM))
    found += [
        SyscallRule("ioctl", errno.EPERM, (ArgumentTest(1, request),)) for request in (TIOCSTI, TIOCLINUX)
    ]
    return found


def landlock_rules(*, abi: int, shares_uid: bool, network: bool, loopback: bool) -> list[SyscallRule]:
    """The rules for a job under Landlock of version `abi`; `shares_uid`: it has the platform's own uid."""
    found = kernel_rules(network=network, loopback=loopback)
    found += [SyscallRule(name, errno.EPERM) for name in SHARED]
    found += process_rules()
    if abi < 3:
        found += truncation_rules()
    if shares_uid:
        found += ownership_rules()
    if abi < 3 or shares_uid:
        found.append(
            SyscallRule("openat2", errno.ENOSYS)
        )  # its flags lie in memory, where a filter cannot look
    return found


def namespace_rules() -> list[SyscallRule]:
    """No new namespaces. clone3 has its flags in memory: without it, the C library uses clone."""
    return [
        SyscallRule("clone", errno.EPERM, (ArgumentTest(0, 0, NEW_NAMESPACES, is_equal=False),)),
        SyscallRule(
            "unshare", errno.EPERM, (ArgumentTest(0, 0, NEW_NAMESPACES | NEW_TIME_NAMESPACE, is_equal=False),)
        ),
        SyscallRule("clone3", errno.ENOSYS),
    ]


def lone_process_rules() -> list[SyscallRule]:
    """No further process: only clones that are threads. They come before all other rules; clone3 is refused there."""
    return [
        SyscallRule("clone", errno.EPERM, (ArgumentTest(0, 0, CLONE_THREAD),)),
        SyscallRule("fork", errno.EPERM),
        SyscallRule("vfork", errno.EPERM),
    ]


def socket_rules(*, network: bool, loopback: bool) -> list[SyscallRule]:
    """Unix sockets; TCP where Landlock or a grant governs it; other families and protocols where granted."""
    allowed: list[tuple[ArgumentTest, ...]] = [(ArgumentTest(0, AF_UNIX),)]
    for family in (AF_INET, AF_INET6):
        if network:
            allowed += [
                (ArgumentTest(0, family), ArgumentTest(1, kind, SOCK_TYPE_MASK))
                for kind in (SOCK_STREAM, SOCK_DGRAM)
            ]
        elif loopback:
            allowed += [
                (
                    ArgumentTest(0, family),
                    ArgumentTest(1, SOCK_STREAM, SOCK_TYPE_MASK),
                    ArgumentTest(2, protocol),
                )
                for protocol in ANY_TCP
            ]
    if network or loopback:  # tells the names and addresses of the interfaces
        allowed.append((ArgumentTest(0, AF_NETLINK), ArgumentTest(2, NETLINK_ROUTE)))
    found = [SyscallRule("socket", None, tests) for tests in allowed]
    found += [
        SyscallRule("socket", errno.EACCES, (ArgumentTest(0, family),)) for family in (AF_INET, AF_INET6)
    ]
    # As a kernel without the family answers, for which libraries are prepared.
    found.append(SyscallRule("socket", errno.EAFNOSUPPORT))
    found += [
        SyscallRule("socketpair", None, (ArgumentTest(0, AF_UNIX),)),
        SyscallRule("socketpair", errno.EAFNOSUPPORT),
    ]
    if not network:  # connects without connect(), past Landlock
        found += [
            SyscallRule(name, errno.EPERM, (ArgumentTest(flags, 0, MSG_FASTOPEN, is_equal=False),))
            for name, flags in (("sendto", 3), ("sendmsg", 2), ("sendmmsg", 3))
        ]
    return found


def process_rules() -> list[SyscallRule]:
    """No change of limits and priorities of other processes, and no signal to everybody."""
    other = ArgumentTest(0, 0, is_equal=False)
    found = [
        SyscallRule(name, errno.EPERM, (other,))
        for name in ("prlimit64", "sched_setattr", "sched_setparam", "sched_setscheduler")
    ]
    for name, everybody in (("setpriority", PRIO_USER), ("ioprio_set", IOPRIO_WHO_USER)):
        found.append(SyscallRule(name, errno.EPERM, (ArgumentTest(0, everybody),)))
        found.append(SyscallRule(name, errno.EPERM, (ArgumentTest(1, 0, is_equal=False),)))
    found.append(SyscallRule("kill", errno.EPERM, (ArgumentTest(0, EVERYBODY),)))
    return found


def truncation_rules() -> list[SyscallRule]:
    """No truncation that Landlock does not see: by path, and by opening for reading only."""
    found = [SyscallRule("truncate", errno.EPERM)]
    for name, flags in (("open", 1), ("openat", 2)):
        tests = (ArgumentTest(flags, O_TRUNC, O_TRUNC), ArgumentTest(flags, 0, O_ACCMODE))
        found.append(SyscallRule(name, errno.EPERM, tests))
    return found


def ownership_rules() -> list[SyscallRule]:
    """No change of the platform's files and processes by their owner's rights, and no setuid files of its uid.

    Landlock does not govern chmod and its kin, and a filter cannot tell whose path is meant. They report success
    without an effect, since copying a file would fail otherwise. The time of a file may become now: heartbeats do that.
    """
    now = (ArgumentTest(2, 0), ArgumentTest(2, 0, is_upper=True))
    found = [SyscallRule("utimensat", None, now), SyscallRule("utimensat", 0)]
    found += [SyscallRule(name, 0) for name in NO_EFFECT]
    # Libraries name each of their threads to pin it, and complain where that fails.
    found.append(SyscallRule("sched_setaffinity", 0, (ArgumentTest(0, 0, is_equal=False),)))
    found += [SyscallRule(name, errno.EOPNOTSUPP) for name in EXTENDED_ATTRIBUTES]
    for name, mode in (("creat", 1), ("mkdir", 1), ("mkdirat", 2), ("mknod", 1), ("mknodat", 2)):
        found.append(SyscallRule(name, errno.EPERM, (ArgumentTest(mode, 0, SETUID_SETGID, is_equal=False),)))
    for name, flags in (("open", 1), ("openat", 2)):
        for creates in (O_CREAT, O_TMPFILE):
            tests = (
                ArgumentTest(flags, 0, creates, is_equal=False),
                ArgumentTest(flags + 1, 0, SETUID_SETGID, is_equal=False),
            )
            found.append(SyscallRule(name, errno.EPERM, tests))
    return found


def assemble(found: Sequence[SyscallRule], *, machine: str) -> list[Instruction]:
    """The program for a machine; KeyError where its system calls are not known."""
    architecture, column = ARCHITECTURES[machine], list(ARCHITECTURES).index(machine)
    program = [
        Instruction(LOAD, 0, 0, ARCHITECTURE_AT),
        Instruction(JUMP_EQUAL, 1, 0, architecture),
        Instruction(RETURN, 0, 0, KILL),
        Instruction(LOAD, 0, 0, NUMBER_AT),
    ]
    if machine == "x86_64":
        program += [Instruction(JUMP_SET, 0, 1, X32), Instruction(RETURN, 0, 0, ERROR | errno.ENOSYS)]
    numbered = [(number, rule) for rule in found if (number := SYSCALLS[rule.syscall][column]) is not None]
    count = Counter(rule.syscall for rule in found)
    alone = [(number, rule) for number, rule in numbered if count[rule.syscall] == 1 and not rule.tests]
    for error in sorted({rule.error for _, rule in alone if rule.error is not None}):
        program += refuse_all([number for number, rule in alone if rule.error == error], error)
    for number, rule in numbered:
        if (number, rule) not in alone:
            program += apply_rule(number, rule)
    return [*program, Instruction(RETURN, 0, 0, ALLOW)]


def refuse_all(numbers: Sequence[int], error: int) -> Iterable[Instruction]:
    """One comparison a call, and one end for all of them; the number of the call is loaded before and after."""
    for first in range(0, len(numbers), FARTHEST_JUMP - 1):
        some = numbers[first : first + FARTHEST_JUMP - 1]
        for at, number in enumerate(some, 1):
            last = at == len(some)
            yield Instruction(JUMP_EQUAL, len(some) - at, 1 if last else 0, number)
        yield Instruction(RETURN, 0, 0, ERROR | error)


def apply_rule(number: int, rule: SyscallRule) -> list[Instruction]:
    """The instructions of one rule: where a test does not hold, the program goes on behind them."""
    steps = [Instruction(LOAD, 0, 0, NUMBER_AT), Instruction(JUMP_EQUAL, 0, 1, number)]
    for test in rule.tests:
        steps.append(Instruction(LOAD, 0, 0, ARGUMENTS_AT + 8 * test.argument + 4 * test.is_upper))
        if test.mask != WHOLE:
            steps.append(Instruction(AND, 0, 0, test.mask))
        steps.append(
            Instruction(JUMP_EQUAL, 0, 1, test.value)
            if test.is_equal
            else Instruction(JUMP_EQUAL, 1, 0, test.value)
        )
    steps.append(Instruction(RETURN, 0, 0, ALLOW if rule.error is None else ERROR | rule.error))
    return [aim(step, len(steps) - at - 1) for at, step in enumerate(steps)]


def aim(step: Instruction, rest: int) -> Instruction:
    """Turn the 1 of a jump out of the rule into the distance to what follows it."""
    if step.code != JUMP_EQUAL:
        return step
    return step._replace(jump_true=step.jump_true * rest, jump_false=step.jump_false * rest)


def encode(program: Iterable[Instruction]) -> bytes:
    """The program as the kernel reads it: an array of struct sock_filter."""
    return b"".join(struct.pack("HBBI", *step) for step in program)
