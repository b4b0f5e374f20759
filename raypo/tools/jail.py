"""Run one Python program in a sandbox. This script needs only the standard library.

    python -I -S jail.py < jail.json     (the fields of `Jail` as a JSON object)

The program gets its own Linux namespaces, which need no root:

- processes: processes that the program leaves behind are killed with it;
- mounts: its root is an empty file system in memory, with Python and the system's libraries
  read-only;
- network: none;
- users: it runs as nobody, without capabilities;
- System V IPC.

The kernel enforces the limits on memory, processes and files. System calls that would allocate
memory outside of these limits are refused.

Three processes take part:

- the supervisor, this script, outside the namespaces. It kills init at the time limit, on SIGTERM,
  and when its own parent dies.
- init, process 1 of the namespaces and leader of a session of its own, so that no signal to a
  process group leaves them. It waits for the program. The kernel kills it when the supervisor dies,
  and all other processes of the namespaces with it. It keeps its capabilities, so a program can
  neither trace it nor take its files, and process 1 ignores the signals of its own namespace.
- the program, which can call off its parent-death signal, for example by calling exec in a thread.

Only the first line of JSON in the file descriptor `report` counts: `{"status": the status of
waitpid, "timed_out": bool}`, or `{"failed": reason}` if the host does not support the sandbox.

Reasons against bubblewrap (bwrap 0.8 was tried): it maps a single user. If root starts it, as in
most containers, the sandboxed program is root outside the sandbox, and the kernel applies no limit
on its processes (60 processes ran under a limit of 8). If the user nobody starts it, it cannot read
a Python installation below /root. Its file system in memory has no limit on the number of files. We
would still need our own code for the seccomp filter and the limits.
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
"""Mount point of the program's root. Every Linux has this folder, and it contains no Python."""
PROGRAM_ROOT = NEW_ROOT + "/room"
"""The program's `/`. It is a chroot below the new root, because the kernel refuses user namespaces
to chrooted processes. Most attacks on the kernel need user namespaces."""
HOME = "/sandbox"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

# Constants of the kernel's headers; they are the same on all architectures.
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
"""Offsets in the kernel's `struct seccomp_data`."""
X32 = 0x40000000
"""First system call number of the x32 ABI, which repeats the calls of x86-64."""

MACHINES = ("x86_64", "aarch64")
AUDIT_ARCH = (0xC000003E, 0xC00000B7)
SYS_PIVOT_ROOT = (155, 41)
REFUSED_CALLS = {
    # These allocate memory outside of address spaces and files, where no limit applies.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "vmsplice": (278, 75),
    # The kernel bounds the number of these for each user, and the caller may be the same user.
    "inotify_init": (253, 26),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    # These reach into other processes, such as init.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    # These are large parts of the kernel's attack surface, and programs do not need them.
    "io_uring_setup": (425, 425),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}
"""Refused system calls, with their numbers on each machine of MACHINES."""
SOCKET_CALLS = {"socket": (41, 198), "socketpair": (53, 199)}
"""System calls that are allowed only for FAMILIES, with their numbers on each machine."""
FAMILIES = (1, 2, 10)
"""Allowed socket families: AF_UNIX, AF_INET, AF_INET6. Others are refused because some, such as
AF_VSOCK of virtual machines, belong to no network namespace."""

_libc = ctypes.CDLL(None, use_errno=True)


class Jail(NamedTuple):
    """A program and its limits."""

    program: str
    report: int
    """File descriptor for the report."""
    time_limit_s: float
    memory_bytes: int
    """Limit of the address space of each process."""
    processes: int
    """Maximum number of concurrent processes and threads."""
    file_bytes: int
    """Maximum total size of all files."""
    files: int
    """Maximum number of files, and of open file descriptors of a process."""
    readable: tuple[str, ...]
    """Additional folders to read and import from."""


def main(jail: Jail) -> None:
    """Run the program and write the report."""
    os.set_inheritable(jail.report, False)
    _check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0), "prctl")
    try:
        _enter_namespaces()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
        init = os.fork()
    except OSError as error:
        _report(jail, {"failed": str(error)})
        return
    if init == 0:
        _run_as_init(jail)
    signal_info = signal.sigtimedwait({signal.SIGTERM, signal.SIGCHLD}, jail.time_limit_s)
    with suppress(ProcessLookupError):
        os.kill(init, signal.SIGKILL)  # this also ends its namespaces
    _, status = os.waitpid(init, 0)
    _report(
        jail, {"status": status, "timed_out": signal_info is None}
    )  # ignored if init has reported


def _run_as_init(jail: Jail) -> NoReturn:
    """Start the program, reap all processes of the namespace, and report the program's status."""
    try:
        os.setsid()
        _check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the program could trigger a Python handler
        program = os.fork()
        if program == 0:
            _exec_program(jail)
        pid = status = 0
        while pid != program:
            pid, status = os.waitpid(-1, 0)
        _report(jail, {"status": status, "timed_out": False})
    except (OSError, ValueError) as error:  # setrlimit raises ValueError
        _report(jail, {"failed": str(error)})
    os._exit(0)


def _enter_namespaces() -> None:
    """Enter new namespaces, and keep root's capabilities in them until the program starts."""
    read_end, write_end = os.pipe()
    supervisor = os.getpid()
    helper = os.fork()
    # A helper process outside the namespaces writes the user maps, because inside this process no
    # longer knows its own ids, and because only root outside may map two users.
    if helper == 0:
        os.close(write_end)
        os.read(read_end, 1)
        code = 1
        with suppress(OSError):
            _map_users(supervisor)
            code = 0
        os._exit(code)
    os.close(read_end)
    flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC
    try:
        _check(_libc.unshare(flags), "unshare")
    finally:
        os.close(write_end)
        _, status = os.waitpid(helper, 0)
    if status:
        raise OSError("the users of a new namespace cannot be mapped in /proc/PID/uid_map")


def _map_users(supervisor: int) -> None:
    """Map nobody inside the namespace to the calling user, or to nobody if that user is root."""
    user, group = os.geteuid(), os.getegid()
    root_line = "\n0 0 1" if user == 0 else ""  # root must map itself to read its own files
    if user != 0:
        _write(f"/proc/{supervisor}/setgroups", "deny")
    outside_user, outside_group = (NOBODY, NOBODY) if user == 0 else (user, group)
    _write(f"/proc/{supervisor}/uid_map", f"{NOBODY} {outside_user} 1{root_line}")
    _write(f"/proc/{supervisor}/gid_map", f"{NOBODY} {outside_group} 1{root_line}")


def _exec_program(jail: Jail) -> NoReturn:
    """Build the program's root, enter it, apply the limits and exec the program."""
    with suppress(OSError):  # let the OOM killer pick this process, not the caller
        _write("/proc/self/oom_score_adj", "1000")
    prefixes = (sys.base_prefix, sys.base_exec_prefix)
    _enter_program_root((*SYSTEM, *prefixes, *jail.readable), jail)
    _write("program.py", jail.program)
    limits = {
        resource.RLIMIT_AS: jail.memory_bytes,
        resource.RLIMIT_FSIZE: jail.file_bytes,
        resource.RLIMIT_NOFILE: jail.files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: jail.processes + 2 * (os.geteuid() != 0),  # supervisor and init
        # This bounds timers too. The caller may be the same user.
        resource.RLIMIT_SIGPENDING: jail.files,
    }
    for limit, maximum in limits.items():
        resource.setrlimit(limit, (maximum, maximum))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
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
    """Install a seccomp filter against REFUSED, sockets outside FAMILIES, foreign ABIs and x32."""
    machine = _machine()
    refuse = (BPF_RETURN, 0, 0, SECCOMP_RET_ERRNO | errno.EPERM)
    instructions = [
        (BPF_LOAD, 0, 0, ARCHITECTURE),
        (BPF_IS_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (BPF_RETURN, 0, 0, SECCOMP_RET_KILL_PROCESS),
        (BPF_LOAD, 0, 0, SYSCALL),
        *((BPF_IS_AT_LEAST, 0, 1, X32), refuse),
    ]
    for numbers in REFUSED_CALLS.values():
        instructions += [(BPF_IS_EQUAL, 0, 1, numbers[machine]), refuse]
    socket, socketpair = (numbers[machine] for numbers in SOCKET_CALLS.values())
    instructions += [
        (BPF_IS_EQUAL, 1, 0, socket),
        (BPF_IS_EQUAL, 0, len(FAMILIES) + 2, socketpair),
        (BPF_LOAD, 0, 0, FIRST_ARGUMENT),
        *(
            (BPF_IS_EQUAL, jump, 0, family)
            for jump, family in zip((3, 2, 1), FAMILIES, strict=True)
        ),
        refuse,
        (BPF_RETURN, 0, 0, SECCOMP_RET_ALLOW),
    ]
    program = _Program(len(instructions), (_Instruction * len(instructions))(*instructions))
    result = _libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)
    _check(result, "prctl(PR_SET_SECCOMP)")


def _machine() -> int:
    """Return the index of this CPU architecture in MACHINES."""
    name = os.uname().machine
    if name not in MACHINES:
        raise OSError(f"system call numbers are known only for {', '.join(MACHINES)}, not {name}")
    return MACHINES.index(name)


def _enter_program_root(paths: Iterable[str], jail: Jail) -> None:
    """Mount a read-only root with these paths and an empty home, and enter it."""
    _mount("", "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", NEW_ROOT, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in sorted(set(paths), key=len):  # parents first, because they include their subfolders
        if os.path.lexists(PROGRAM_ROOT + path):
            continue
        if os.path.islink(path):  # /bin is usr/bin
            os.makedirs(os.path.dirname(PROGRAM_ROOT + path), exist_ok=True)
            os.symlink(os.readlink(path), PROGRAM_ROOT + path)
        elif os.path.exists(path):
            _bind_mount(path)
            _make_read_only(PROGRAM_ROOT + path)
    for path in DEVICES:
        _bind_mount(path)
    os.mkdir(PROGRAM_ROOT + HOME)
    size = f"size={jail.file_bytes},nr_inodes={jail.files},mode=700,uid={NOBODY},gid={NOBODY}"
    _mount("tmpfs", PROGRAM_ROOT + HOME, "tmpfs", MS_NOSUID | MS_NODEV, size)
    if not os.path.exists(PROGRAM_ROOT + "/tmp"):  # a readable folder may be in /tmp
        os.symlink(HOME, PROGRAM_ROOT + "/tmp")
    _mount("", NEW_ROOT, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir(NEW_ROOT)
    _check(_libc.syscall(SYS_PIVOT_ROOT[_machine()], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "umount2")
    os.chroot(PROGRAM_ROOT.removeprefix(NEW_ROOT))
    os.chdir(HOME)


def _bind_mount(path: str) -> None:
    """Bind-mount a path of the host into the root, with all mounts below it."""
    target = PROGRAM_ROOT + path
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        _write(target, "")
    _mount(path, target, None, MS_BIND | MS_REC)


class _MountAttributes(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint64) for n in ("set", "clear", "propagation", "userns_fd")]


def _make_read_only(path: str) -> None:
    """Make a path read-only, with all mounts below it. A remount would not change these mounts."""
    attributes = _MountAttributes(set=MS_RDONLY | MS_NOSUID | MS_NODEV)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    result = _libc.syscall(
        SYS_MOUNT_SETATTR, AT_FDCWD, os.fsencode(path), AT_RECURSIVE, ctypes.byref(attributes), size
    )
    _check(result, f"mount_setattr {path}")


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


def _report(jail: Jail, result: dict[str, object]) -> None:
    os.write(jail.report, json.dumps(result).encode() + b"\n")


if __name__ == "__main__":
    fields = json.load(sys.stdin)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    os.dup2(sys.stdin.fileno(), 0)
    main(Jail(**fields))
