"""Runs one Python program where it can reach nothing. A script of its own, of the standard library.

    python -I -S jail.py < jail.json     the fields of `Jail` as a JSON object

The program gets new Linux namespaces, none of which needs root: of processes (those that it leaves
behind end with it), of mounts (its root is an empty file system in memory, with Python and the
system's libraries read-only), of the network (there is none), of users (it is nobody, without
capabilities) and of System V's shared memory. Limits of memory, processes and files are the
kernel's; system calls that would take memory beside them are refused. This script stays outside as
its keeper: it ends all of it at the time limit, on SIGTERM, and when whoever asked is gone. Its
report, on the file descriptor of that name, is a line of JSON:
`{"status": as waitpid tells, "timed_out": bool}`, or before it `{"failed": what the host refuses}`.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple, NoReturn

NOBODY = 65534
NEW_ROOT = "/sys"
"""Where the program's root is mounted first: a folder of every Linux that no Python lies in."""
ROOM = NEW_ROOT + "/room"
"""The program's `/`. A chroot below the root: the kernel refuses user namespaces to what is in one,
and with them most of the ways to attack it."""
HOME = "/sandbox"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

# From the kernel's headers; the same on all architectures.
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT = 1, 2, 4, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE, SYS_MOUNT_SETATTR = -100, 0x8000, 442
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SECCOMP_MODE_FILTER, SECCOMP_RET_ERRNO, SECCOMP_RET_ALLOW = 2, 0x00050000, 0x7FFF0000
SECCOMP_RET_KILL_PROCESS = 0x80000000
BPF_LOAD, BPF_IS_EQUAL, BPF_IS_AT_LEAST, BPF_RETURN = 0x20, 0x15, 0x35, 0x06
SYSCALL, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
"""Where the kernel's `struct seccomp_data` has them."""
X32 = 0x40000000
"""From here on x86-64 repeats its system calls."""

MACHINES = ("x86_64", "aarch64")
AUDIT_ARCH = (0xC000003E, 0xC00000B7)
SYS_PIVOT_ROOT, SYS_SOCKET = (155, 41), (41, 198)
REFUSED = {
    # Memory that lies in no address space and no file, so that no limit holds it.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "vmsplice": (278, 75),
    # Large parts of the kernel that programs do not need.
    "io_uring_setup": (425, 425),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}
"""System calls and their numbers, by machine."""
FAMILIES = (1, 2, 10)
"""Of sockets that there may be: AF_UNIX, AF_INET, AF_INET6. A virtual machine's AF_VSOCK, for one,
belongs to no namespace of the network."""

_libc = ctypes.CDLL(None, use_errno=True)


class Jail(NamedTuple):
    """A program and its limits."""

    program: str
    report: int
    """File descriptor that the report is written to."""
    time_limit_s: float
    memory_bytes: int
    """Address space of each process."""
    processes: int
    """And threads, at a time."""
    file_bytes: int
    """All files together."""
    files: int
    """That there may be, and that a process may have open."""
    readable: tuple[str, ...]
    """Folders besides Python's own that it may read and import from."""


def main(jail: Jail) -> None:
    """Run the program and report."""
    os.set_inheritable(jail.report, False)
    _check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0), "prctl")
    try:
        _leave_namespaces()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
        program = os.fork()
    except OSError as error:
        _report(jail, {"failed": str(error)})
        return
    if program == 0:
        try:
            _become(jail)
        except (OSError, ValueError) as error:  # ValueError: of setrlimit
            _report(jail, {"failed": str(error)})
            os._exit(1)
    heard = signal.sigtimedwait({signal.SIGTERM, signal.SIGCHLD}, jail.time_limit_s)
    with suppress(ProcessLookupError):
        os.kill(program, signal.SIGKILL)  # the first of its namespace: all others end with it
    _, status = os.waitpid(program, 0)
    _report(jail, {"status": status, "timed_out": heard is None})


def _leave_namespaces() -> None:
    """Be root of a new user namespace, for as long as it takes to build a room in the others."""
    ready, told = os.pipe()
    keeper = os.getpid()
    helper = os.fork()
    if helper == 0:  # who has left cannot say who it was; only root may be two users
        os.close(told)
        os.read(ready, 1)
        code = 1
        with suppress(OSError):
            _map_users(keeper)
            code = 0
        os._exit(code)
    os.close(ready)
    flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC
    try:
        _check(_libc.unshare(flags), "unshare")
    finally:
        os.close(told)
        _, status = os.waitpid(helper, 0)
    if status:
        raise OSError("the users of a new namespace cannot be named in /proc/PID/uid_map")


def _map_users(keeper: int) -> None:
    """Inside, the program is nobody; the root who builds its room is outside whoever started it."""
    user, group = os.geteuid(), os.getegid()
    with_root = "\n0 0 1" if user == 0 else ""  # root needs itself to read what is its own
    if user != 0:
        _write(f"/proc/{keeper}/setgroups", "deny")
    outside_user, outside_group = (NOBODY, NOBODY) if user == 0 else (user, group)
    _write(f"/proc/{keeper}/uid_map", f"{NOBODY} {outside_user} 1{with_root}")
    _write(f"/proc/{keeper}/gid_map", f"{NOBODY} {outside_group} 1{with_root}")


def _become(jail: Jail) -> NoReturn:
    """Build the room, go into it, and be the program."""
    with suppress(OSError):  # where memory runs out, the kernel shall take it and not who asked
        _write("/proc/self/oom_score_adj", "1000")
    prefixes = (sys.base_prefix, sys.base_exec_prefix)
    _build_room((*SYSTEM, *prefixes, *jail.readable), jail)
    _write("program.py", jail.program)
    limits = {
        resource.RLIMIT_AS: jail.memory_bytes,
        resource.RLIMIT_FSIZE: jail.file_bytes,
        resource.RLIMIT_NOFILE: jail.files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: jail.processes + (os.geteuid() != 0),  # the keeper is the same user
    }
    for limit, most in limits.items():
        resource.setrlimit(limit, (most, most))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    _check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    _refuse_system_calls()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})
    environment = {
        "HOME": HOME,
        "PATH": "/usr/bin:/bin",
        "TMPDIR": HOME,
        "PYTHONPATH": ":".join(jail.readable),
        "PYTHONUTF8": "1",
        "OMP_NUM_THREADS": "1",
    }
    os.execve(sys.executable, [sys.executable, "-sBu", "program.py"], environment)


class _Instruction(ctypes.Structure):
    """One instruction of a seccomp filter (a packet filter's `struct sock_filter`)."""

    _fields_ = [
        ("code", ctypes.c_uint16),
        ("jump_if", ctypes.c_uint8),
        ("jump_else", ctypes.c_uint8),
        ("operand", ctypes.c_uint32),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction))]


def _refuse_system_calls() -> None:
    """REFUSED, sockets but of FAMILIES, and the ways around: another machine's numbers, and x32."""
    machine = _machine()
    refuse = (BPF_RETURN, 0, 0, SECCOMP_RET_ERRNO | errno.EPERM)
    steps = [
        (BPF_LOAD, 0, 0, ARCHITECTURE),
        (BPF_IS_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (BPF_RETURN, 0, 0, SECCOMP_RET_KILL_PROCESS),
        (BPF_LOAD, 0, 0, SYSCALL),
        *((BPF_IS_AT_LEAST, 0, 1, X32), refuse),
    ]
    for numbers in REFUSED.values():
        steps += [(BPF_IS_EQUAL, 0, 1, numbers[machine]), refuse]
    steps += [
        (BPF_IS_EQUAL, 0, len(FAMILIES) + 2, SYS_SOCKET[machine]),
        (BPF_LOAD, 0, 0, FIRST_ARGUMENT),
        *((BPF_IS_EQUAL, left, 0, each) for left, each in zip((3, 2, 1), FAMILIES, strict=True)),
        refuse,
        (BPF_RETURN, 0, 0, SECCOMP_RET_ALLOW),
    ]
    program = _Program(len(steps), (_Instruction * len(steps))(*steps))
    done = _libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)
    _check(done, "prctl(PR_SET_SECCOMP)")


def _machine() -> int:
    """Its place in MACHINES."""
    name = os.uname().machine
    if name not in MACHINES:
        raise OSError(
            f"the numbers of system calls are known for {', '.join(MACHINES)}, not {name}"
        )
    return MACHINES.index(name)


def _build_room(paths: Iterable[str], jail: Jail) -> None:
    """A root of these paths, read-only, and an empty home; the working folder is there."""
    _mount("", "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", NEW_ROOT, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in sorted(set(paths), key=len):  # a folder before those in it, which it shows too
        if os.path.lexists(ROOM + path):
            continue
        if os.path.islink(path):  # /bin is usr/bin
            os.makedirs(os.path.dirname(ROOM + path), exist_ok=True)
            os.symlink(os.readlink(path), ROOM + path)
        elif os.path.exists(path):
            _show(path)
            _make_read_only(ROOM + path)
    for path in DEVICES:
        _show(path)
    os.mkdir(ROOM + HOME)
    size = f"size={jail.file_bytes},nr_inodes={jail.files},mode=700,uid={NOBODY},gid={NOBODY}"
    _mount("tmpfs", ROOM + HOME, "tmpfs", MS_NOSUID | MS_NODEV, size)
    if not os.path.exists(ROOM + "/tmp"):  # a folder to read may lie there
        os.symlink(HOME, ROOM + "/tmp")
    _mount("", NEW_ROOT, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir(NEW_ROOT)
    _check(_libc.syscall(SYS_PIVOT_ROOT[_machine()], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "umount2")
    os.chroot(ROOM.removeprefix(NEW_ROOT))
    os.chdir(HOME)


def _show(path: str) -> None:
    """Have a path of the host in the room, with all that is mounted below it."""
    there = ROOM + path
    if os.path.isdir(path):
        os.makedirs(there, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(there), exist_ok=True)
        _write(there, "")
    _mount(path, there, None, MS_BIND | MS_REC)


class _MountAttributes(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint64) for n in ("set", "clear", "propagation", "userns_fd")]


def _make_read_only(path: str) -> None:
    """Read-only, with all that is mounted below: a remount would leave those as they are."""
    wanted = _MountAttributes(set=MS_RDONLY | MS_NOSUID | MS_NODEV)
    size = ctypes.c_size_t(ctypes.sizeof(wanted))
    done = _libc.syscall(
        SYS_MOUNT_SETATTR, AT_FDCWD, os.fsencode(path), AT_RECURSIVE, ctypes.byref(wanted), size
    )
    _check(done, f"mount_setattr {path}")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    _check(_libc.mount(*texts, ctypes.c_ulong(flags), os.fsencode(options)), f"mount {target}")


def _check(result: int, call: str) -> None:
    if result:
        error = ctypes.get_errno()
        raise OSError(error, f"{call}: {os.strerror(error)}")


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)


def _report(jail: Jail, said: dict[str, object]) -> None:
    os.write(jail.report, json.dumps(said).encode() + b"\n")


if __name__ == "__main__":
    fields = json.load(sys.stdin)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    os.dup2(sys.stdin.fileno(), 0)
    main(Jail(**fields))
