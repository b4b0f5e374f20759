"""What a program in the sandbox can do, and what it cannot; each of them is really run."""

import asyncio
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from raypo.tools import jail, sandbox
from raypo.tools.sandbox import ProgramResult, PythonSandbox, SandboxError

REPOSITORY = Path(__file__).parents[3]


def run(code: str, **limits) -> ProgramResult:
    return asyncio.run(PythonSandbox(**limits).run(code))


pytestmark = pytest.mark.usefixtures("python_sandbox")


def processes_with(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            pass
    return found


def until_gone(mark: str, but: int | None = None) -> bool:
    deadline = time.monotonic() + 20
    while (left := {*processes_with(mark)} - {but}) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not left


LEAVE_BEHIND = """
import ctypes, os, sys, time
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # even where its death with its parent is called off
if os.fork() == 0:
    os.setsid()
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(100)", "{mark}"])
"""


def test_a_program_prints_and_its_errors_are_seen():
    ran = run("print(6 * 7)\nprint(undefined)")
    assert ran.exit_code == 1
    assert ran.output.startswith("42\nTraceback")
    assert "NameError: name 'undefined' is not defined" in ran.output


def test_the_standard_library_and_subprocesses_work():
    code = (
        "import json, math, sqlite3, subprocess, sys, tempfile\n"
        "print(tempfile.mkdtemp().startswith('/sandbox'))\n"
        "print(subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True, text=True))"
    )
    ran = run(code)
    assert ran.exit_code == 0, ran.output
    assert ran.output.startswith("True\n")
    assert "stdout='1\\n'" in ran.output


def test_folders_that_it_may_read_are_imported_from_and_not_written_to(tmp_path):
    (tmp_path / "mine.py").write_text("value = 7")
    tmp_path.chmod(0o755)
    (tmp_path / "mine.py").chmod(0o666)
    code = f"import mine; print(mine.value); open({str(tmp_path / 'mine.py')!r}, 'a')"
    ran = run(code, readable=[tmp_path])
    assert ran.output.startswith("7\n")
    assert "Read-only file system" in ran.output
    assert (tmp_path / "mine.py").read_text() == "value = 7"


def test_a_folder_is_read_also_where_one_in_it_is_named_before(tmp_path):
    inner, file = tmp_path / "a" / "b", tmp_path / "mine.txt"
    inner.mkdir(parents=True)
    file.write_text("7")
    for folder in (tmp_path, inner.parent, inner):
        folder.chmod(0o755)
    code = f"import os; print(open({str(file)!r}).read(), os.listdir({str(inner)!r}))"
    assert run(code, readable=[inner, tmp_path]) == ProgramResult("7 []\n", 0)


def test_what_it_writes_is_gone_with_it():
    sandbox = PythonSandbox()

    async def twice() -> list[ProgramResult]:
        return [
            await sandbox.run("open('x', 'w').write('1'); open('/tmp/y', 'w')"),
            await sandbox.run("import os; print(os.listdir())"),
        ]

    assert asyncio.run(twice()) == [ProgramResult("", 0), ProgramResult("['program.py']\n", 0)]
    assert not Path("/tmp/y").exists()


def test_an_endless_loop_is_ended_and_what_it_printed_is_kept():
    begin = time.monotonic()
    ran = run("print('begun')\nwhile True: pass", time_limit_s=3.0)
    assert ran == ProgramResult("begun\n", None)
    assert time.monotonic() - begin < 30


def test_sleeping_with_every_signal_ignored_is_ended_too():
    code = (
        "import signal, time\n"
        "for one in range(1, 32):\n"
        "    if one not in (9, 19): signal.signal(one, signal.SIG_IGN)\n"
        "time.sleep(100)"
    )
    assert run(code, time_limit_s=0.5).exit_code is None


def test_an_allocation_of_10_gb_is_a_memory_error():
    ran = run("x = bytearray(10 * 10**9)")
    assert ran.exit_code == 1
    assert "MemoryError" in ran.output


LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"


def test_no_memory_is_kept_in_segments_that_are_mapped_nowhere():
    code = LIBC + (
        "libc.shmat.restype = ctypes.c_void_p\n"
        "held = 0\n"
        "while held < 2**30 and (segment := libc.shmget(0, 2**26, 0o1600)) >= 0:\n"
        "    there = libc.shmat(segment, None, 0)\n"
        "    ctypes.memset(there, 1, 2**26)\n"
        "    libc.shmdt(ctypes.c_void_p(there))\n"
        "    held += 2**26\n"
        "print(held, os.strerror(ctypes.get_errno()))"
    )
    assert run(code) == ProgramResult("0 Operation not permitted\n", 0)


def test_no_memory_is_kept_in_files_that_lie_nowhere():
    code = (
        "import os\n"
        "held = 0\n"
        "try:\n"
        "    while held < 2**30:\n"
        "        held += os.write(os.memfd_create('x'), bytes(10**7))\n"
        "except PermissionError:\n"
        "    print(held)"
    )
    assert run(code) == ProgramResult("0\n", 0)


def test_system_calls_that_reach_around_the_limits_are_refused():
    machine = jail.MACHINES.index(os.uname().machine)
    numbers = [numbers[machine] for numbers in jail.REFUSED_CALLS.values()]
    x32 = [0x40000000 | number for number in numbers]  # the same once more
    code = LIBC + f"for number in {numbers + x32}: print(libc.syscall(number, 0, 0, 0, 0, 0, 0))\n"
    code += "print(os.strerror(ctypes.get_errno()))"
    assert run(code).output.split("\n")[:-1] == [
        *["-1"] * 2 * len(numbers),
        "Operation not permitted",
    ]


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the code is that of an x86")
def test_system_calls_by_the_numbers_of_32_bits_end_the_program():
    code = (
        "import ctypes, mmap\n"
        "memory = mmap.mmap(-1, 4096, prot=7)\n"
        "memory.write(bytes.fromhex('b814000000cd80c3'))\n"  # getpid by int 0x80
        "there = ctypes.addressof(ctypes.c_char.from_buffer(memory))\n"
        "print(ctypes.CFUNCTYPE(ctypes.c_int)(there)())"
    )
    assert run(code) in (
        ProgramResult("", -signal.SIGSYS),
        ProgramResult("", -signal.SIGSEGV),
    )  # 32 bits may be off


@pytest.mark.parametrize("family", [16, 30, 38, 40])  # AF_NETLINK, AF_TIPC, AF_ALG, AF_VSOCK
@pytest.mark.parametrize("function", ["socket", "socketpair"])
def test_sockets_of_other_families_are_refused(function, family):
    ran = run(f"import socket; socket.{function}({family}, socket.SOCK_DGRAM)")
    assert "PermissionError: [Errno 1]" in ran.output


def test_a_fork_bomb_gets_no_more_processes_than_it_may_have():
    code = (
        "import os, time\n"
        "number = 1\n"
        "try:\n"
        "    while True:\n"
        "        if os.fork() == 0: time.sleep(100)\n"
        "        number += 1\n"
        "except BlockingIOError:\n"
        "    print(number)"
    )
    assert run(code, processes=5) == ProgramResult("5\n", 0)


def test_a_fork_bomb_that_never_stops_is_ended_and_leaves_no_process():
    code = (
        "import os, sys\n"
        "try: os.fork(); os.fork()\n"
        "except OSError: pass\n"
        "code = 'import os\\nwhile True:\\n  try: os.fork()\\n  except OSError: pass'\n"
        "os.execv(sys.executable, [sys.executable, '-c', code, 'raypo-bomb'])"
    )
    assert run(code, time_limit_s=1.0).exit_code is None
    assert processes_with("raypo-bomb") == []


@pytest.mark.parametrize("address", ["1.1.1.1", "127.0.0.1"])
def test_there_is_no_network_and_no_loopback(address):
    ran = run(f"import socket; socket.create_connection(({address!r}, 80), 3)")
    assert "Network is unreachable" in ran.output


def test_sockets_of_the_host_cannot_be_reached(tmp_path):
    import socket

    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0raypo-abstract")
        server.listen()
        ran = run("import socket; socket.socket(socket.AF_UNIX).connect('\\0raypo-abstract')")
    assert "Connection refused" in ran.output


def test_nothing_outside_of_its_folder_is_there(tmp_path):
    (tmp_path / "label.txt").write_text("the label")
    paths = [tmp_path / "label.txt", REPOSITORY, "/etc/passwd", "/proc/1/environ", "/sys", "/var"]
    code = "import os\n" + "\n".join(f"print(os.path.exists({str(path)!r}))" for path in paths)
    assert run(code).output.split() == ["False"] * len(paths)


def test_the_environment_of_the_caller_is_not_told(monkeypatch):
    monkeypatch.setenv("RAYPO_TEST_SECRET", "a secret")
    assert "RAYPO" not in run("import os; print(dict(os.environ))").output


@pytest.mark.parametrize("path", ["/x", "/usr/x", "/dev/x", sys.base_prefix + "/x"])
def test_only_its_own_folder_can_be_written(path):
    ran = run(f"open({path!r}, 'w')")
    assert "Read-only file system" in ran.output


def test_files_have_a_limit_of_bytes_and_of_number():
    assert "No space left" in run("open('x', 'wb').write(b'0' * 3_000_000)", file_mb=2).output
    many = "for number in range(100): open(str(number), 'w').close()"
    assert "No space left" in run(many, files=50).output
    held = "files = [open('program.py') for _ in range(100)]"
    assert "Too many open files" in run(held, files=50).output


def test_endless_output_is_cut_and_does_not_fill_the_memory():
    ran = run("while True: print('x' * 9999)", time_limit_s=3.0, max_output_chars=20)
    assert ran == ProgramResult("x" * 20, None, is_cut=True)


def test_output_of_long_characters_is_counted_by_characters():
    assert run("print('😀' * 21)", max_output_chars=20) == ProgramResult("😀" * 20, 0, is_cut=True)


def test_one_sandbox_serves_event_loop_after_event_loop():
    sandbox = pickle.loads(pickle.dumps(PythonSandbox(at_once=1)))

    async def together() -> list[str]:
        return await asyncio.gather(*(sandbox.python("print(1)") for _ in range(2)))

    for _ in range(2):
        assert asyncio.run(together()) == ["1\n"] * 2
    assert pickle.loads(pickle.dumps(sandbox))


def test_a_limit_that_the_host_does_not_allow_is_refused():
    with pytest.raises(SandboxError, match="maximum limit"):
        run("", files=2**31)


def test_it_is_nobody_and_can_become_no_one_else():
    code = (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "print(os.getuid() == os.geteuid() == 65534)\n"
        "for flags in (0x10000000, 0x20000, 0x40000000):\n"  # users, mounts, network
        "    print(libc.unshare(flags))\n"
        "print(libc.mount(b'tmpfs', b'/sandbox', b'tmpfs', 0, b''))\n"
        "try: os.setuid(0)\n"
        "except PermissionError: print('still nobody')\n"
    )
    assert run(code).output.split("\n")[:-1] == ["True", *["-1"] * 4, "still nobody"]


def test_processes_that_it_leaves_behind_end_with_it():
    ran = run(LEAVE_BEHIND.format(mark="raypo-left-1") + "time.sleep(1)")
    assert ran.exit_code == 0, ran.output
    assert processes_with("raypo-left-1") == []


def test_a_program_whose_caller_stops_waiting_ends_with_all_its_processes():
    async def cancelled() -> None:
        code = LEAVE_BEHIND.format(mark="raypo-left-2") + "time.sleep(100)"
        task = asyncio.create_task(PythonSandbox(time_limit_s=100).run(code))
        while not processes_with("raypo-left-2"):
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert processes_with("raypo-left-2") == []


def test_a_program_whose_caller_is_killed_ends_with_all_its_processes():
    code = LEAVE_BEHIND.format(mark="raypo-left-3") + "time.sleep(100)"
    caller = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import asyncio; from raypo.tools.sandbox import PythonSandbox\n"
            f"asyncio.run(PythonSandbox(time_limit_s=100).run({code!r}))",
        ],
        cwd=REPOSITORY,
    )
    try:
        deadline = time.monotonic() + 30
        while not (left := processes_with("raypo-left-3")) or caller.pid in left:
            left = [pid for pid in left if pid != caller.pid]
            if left or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        assert left
    finally:
        caller.kill()
        caller.wait()
    assert until_gone("raypo-left-3")


def test_no_more_run_at_a_time_than_may():
    async def timed() -> float:
        sandboxes = [PythonSandbox(at_once=2) for _ in range(6)]  # as episodes make them
        begin = time.monotonic()
        await asyncio.gather(*(each.run("import time; time.sleep(0.4)") for each in sandboxes))
        return time.monotonic() - begin

    assert asyncio.run(timed()) > 1.2
    assert not sandbox._pollers  # nor is the event loop kept


def test_no_more_run_at_a_time_than_may_where_plain_methods_have_event_loops_of_their_own():
    def timed(_: int) -> tuple[float, float]:
        sleeps = "import time; begin = time.time(); time.sleep(0.4); print(begin, time.time())"
        begin, end = asyncio.run(PythonSandbox(at_once=2).run(sleeps)).output.split()
        return float(begin), float(end)

    with ThreadPoolExecutor(6) as threads:
        ran = list(threads.map(timed, range(6)))
    assert max(sum(begin <= at < end for begin, end in ran) for at, _ in ran) == 2


def test_the_tool_tells_a_model_how_its_program_ended():
    sandbox, hasty = PythonSandbox(), PythonSandbox(time_limit_s=0.2)

    async def answers() -> list[str]:
        codes = ["1", "print(2)", "import ctypes; ctypes.string_at(0)"]
        told = [await sandbox.python(code) for code in codes]
        return [*told, await hasty.python("while True: pass")]

    assert asyncio.run(answers()) == [
        "(it printed nothing)",
        "2\n",
        "ended by a signal: Segmentation fault",
        "ended after 0.2 s: the time limit",
    ]


def test_a_host_without_namespaces_is_refused_with_a_remedy():
    """The sandbox itself is such a host."""
    code = (
        "import asyncio\n"
        "from raypo.tools.sandbox import PythonSandbox\n"
        "asyncio.run(PythonSandbox().run('print(1)'))"
    )
    ran = run(code, readable=[REPOSITORY])
    assert "SandboxError: [Errno 1] unshare: Operation not permitted" in ran.output
    assert "user.max_user_namespaces" in ran.output


@pytest.fixture(scope="module")
def ordinary_users_folder() -> Iterator[Path]:
    """A folder with the sandbox in it that every user can read, unlike the repository."""
    with tempfile.TemporaryDirectory() as folder:
        tools = Path(folder, "raypo", "tools")
        tools.mkdir(parents=True)
        shutil.copy(jail.__file__, tools)
        shutil.copy(sandbox.__file__, tools)
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture(params=["this user", "an ordinary user"])
def start(request, ordinary_users_folder):
    """Start a program in a sandbox of a process of its own, and return that process, which prints
    its result. Root starts it as itself and as an ordinary user: outside of the sandbox, a program
    of root is another user than its supervisor, and one of an ordinary user is not."""
    python, user = sys.executable, {}
    if request.param == "an ordinary user":
        if os.geteuid() != 0:
            pytest.skip("this user is one")
        user = {"user": 54321, "group": 54321, "extra_groups": []}
        python = shutil.which("python3", path="/usr/bin:/bin")
        if python is None:
            pytest.skip("no Python that other users may run")

    def start_program(code: str, **limits) -> subprocess.Popen[str]:
        script = (
            f"import asyncio, sys; sys.path.insert(0, {str(ordinary_users_folder)!r})\n"
            "from raypo.tools.sandbox import PythonSandbox, ProgramResult\n"
            f"print(asyncio.run(PythonSandbox(**{limits!r}).run({code!r})))"
        )
        command = [python, "-B", "-c", script]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/", **user)

    return start_program


def result(process: subprocess.Popen[str]) -> ProgramResult:
    with process:
        try:
            printed, _ = process.communicate(timeout=30)
        finally:
            process.kill()
    return eval(printed, {"ProgramResult": ProgramResult})


def test_it_needs_no_root(start):
    code = (
        "import os, time\n"
        "print(os.getuid())\n"
        "try:\n"
        "    for number in range(1, 9):\n"
        "        if os.fork() == 0: time.sleep(100)\n"
        "except BlockingIOError: print(number)"
    )
    assert result(start(code, processes=3)) == ProgramResult("65534\n3\n", 0)


def test_a_signal_to_its_process_group_does_not_stop_its_supervisor(start):
    code = "import os, signal, time; os.kill(0, signal.SIGSTOP); time.sleep(100)"
    assert result(start(code, time_limit_s=1.0)) == ProgramResult("", None)


CALL_OFF = "import ctypes; ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\n"  # the parent-death signal
ANOTHER = "os.execv, (sys.executable, [sys.executable, '-c', 'import time; time.sleep(100)', mark])"
"""A program that can be found by a mark in its command line."""


def test_a_signal_to_its_process_group_does_not_kill_its_supervisor(start):
    mark = f"raypo-left-{os.urandom(4).hex()}"
    code = f"import os, signal, sys\nmark = {mark!r}\nexecute, arguments = {ANOTHER}\n"
    code += CALL_OFF + "os.kill(0, signal.SIGKILL)\nexecute(*arguments)"
    assert result(start(code, time_limit_s=5.0)) == ProgramResult("", -signal.SIGKILL)
    assert until_gone(mark)


@pytest.mark.parametrize(
    "call_off",
    [CALL_OFF + "execute(*arguments)", "threading.Thread(target=execute, args=arguments).start()"],
    ids=["prctl", "exec in a thread"],
)
def test_a_program_whose_supervisor_is_killed_ends(start, call_off):
    """It ends whatever it does to the signal that it gets when its parent dies."""
    mark = f"raypo-left-{os.urandom(4).hex()}"
    code = f"import os, sys, threading\nmark = {mark!r}\nexecute, arguments = {ANOTHER}\n"
    with start(code + call_off, time_limit_s=100.0) as process:
        try:
            deadline = time.monotonic() + 30
            while not (pids := [pid for pid in processes_with(mark) if pid != process.pid]):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            supervisor = pids[0]
            while (parent := parent_of(supervisor)) != process.pid:
                supervisor = parent
            os.kill(supervisor, signal.SIGKILL)
            assert until_gone(mark, but=process.pid)
        finally:
            process.kill()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_no_signal_to_process_1_ends_its_namespace(start):
    code = (
        "import os\n"
        "for number in range(1, 65):\n"
        "    try: os.kill(1, number)\n"
        "    except PermissionError: pass\n"
        "print('alive')"
    )
    assert result(start(code)) == ProgramResult("alive\n", 0)


def test_the_signals_that_its_user_may_queue_are_left_to_the_caller(start):
    """The kernel counts them, and timers, by user; the caller's limit holds for both together."""
    code = LIBC + (
        "timer, number = ctypes.c_void_p(), 0\n"
        "while number < 1000 and libc.timer_create(1, 0, ctypes.byref(timer)) == 0: number += 1\n"
        "print(number)"
    )
    assert result(start(code, files=100)) == ProgramResult("100\n", 0)
