"""What the keeper of commands holds them to, with namespaces and without, as root and as another user."""

import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from quengine import kernels
from quengine.kernels.confine import landlock, privileges

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or landlock.version() == 0 or not privileges.supported(), reason="no Landlock"
)
KERNELS = Path(kernels.__file__).parent
START = """
import sys
folder, namespaced = sys.argv.pop(1), sys.argv.pop(1) == "True"
sys.path.append(folder)
from confine import keeper, namespaces
if not namespaced:
    namespaces.enter = lambda writable: False
keeper.main()
"""
NOBODY = 65534
ROOT = os.geteuid() == 0
PYTHONS = {NOBODY: shutil.which("python3", path="/usr/bin") or sys.executable} if ROOT else {}
"""Of users that have no access to this one."""
WAIT = 60.0


@dataclass
class Keeper:
    """A way to run commands: `outside` is a file of the same user that is not theirs to change."""

    folder: Path
    outside: Path
    namespaced: bool
    user: int

    @property
    def python(self) -> str:
        return PYTHONS.get(self.user, sys.executable)

    def start(self, *program: str, how: str = "confined") -> "subprocess.Popen[str]":
        head = [self.python, "-I", "-S", "-c", START, str(KERNELS), str(self.namespaced)]
        return subprocess.Popen(
            [*head, how, str(self.folder / "work"), str(self.folder / "temporary"), *program],
            cwd=self.folder / "work",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            user=self.user,
            group=self.user if ROOT else None,
            extra_groups=[] if ROOT else None,
        )

    def run(self, *program: str, how: str = "confined") -> tuple[int, str]:
        """Its exit status and its output."""
        with self.start(*program, how=how) as process:
            output = process.communicate(timeout=WAIT)[0]
            return process.returncode, output

    def shell(self, line: str) -> tuple[int, str]:
        return self.run("/bin/sh", "-c", line)


@pytest.fixture(
    scope="module",
    params=[
        (namespaced, user)
        for namespaced in (True, False)
        for user in ([0, NOBODY] if ROOT else [os.geteuid()])
    ],
    ids=lambda given: f"{'namespaces' if given[0] else 'none'}-{given[1]}",
)
def keeper(request: pytest.FixtureRequest) -> Iterator[Keeper]:
    namespaced, user = request.param
    folder = Path(tempfile.mkdtemp(prefix="confine-"))
    try:
        folder.chmod(0o755)
        for name in ("work", "temporary"):
            (folder / name).mkdir()
        outside = folder / "outside.txt"
        outside.write_text("kept")
        outside.chmod(0o640)
        if ROOT:
            for path in (folder, *folder.iterdir()):
                os.chown(path, user, user)
        made = Keeper(folder, outside, namespaced, user)
        try:
            code, output = made.run(made.python, "-I", "-S", "-c", "import os; print(os.getppid())")
        except PermissionError:
            pytest.skip("another user has no access to this Python")
        assert code == 0, output
        if namespaced and output != "0\n":
            pytest.skip("no namespaces are allowed here")
        yield made
    finally:
        shutil.rmtree(folder)


def test_metadata_of_other_files_is_kept(keeper: Keeper) -> None:
    before = keeper.outside.stat()
    xattr = f"import os; os.setxattr({str(keeper.outside)!r}, 'user.a', b'b')"
    for line in (
        f"chmod 777 {keeper.outside}",
        f"chown {keeper.user}:{keeper.user} {keeper.outside}",
        f"touch -c -d 2001-01-01 {keeper.outside}",
        f"touch -h -d 2001-01-01 {keeper.outside}",
        f'{keeper.python} -I -S -c "{xattr}"',
        f"chmod 700 {keeper.folder}",
        *(["chmod 600 /etc/passwd", "touch -c /etc/passwd"] if keeper.user == 0 else []),
    ):
        code, output = keeper.shell(line)
        assert code != 0, (line, output)
    after = keeper.outside.stat()
    assert (before.st_mode, before.st_ctime_ns) == (after.st_mode, after.st_ctime_ns)
    assert keeper.outside.read_text() == "kept"


def test_files_of_the_folder_are_written_and_made_executable(keeper: Keeper) -> None:
    assert keeper.shell("echo one > a && mkdir b && mv a b/c && cat b/c") == (0, "one\n")
    code, output = keeper.shell("touch new && touch new && cp b/c d && cat d")
    if keeper.namespaced:
        assert (code, output) == (0, "one\n")
        assert keeper.shell("printf '#!/bin/sh\\necho ran' > s && chmod +x s && ./s") == (0, "ran\n")
        assert stat.S_IMODE((keeper.folder / "work/s").stat().st_mode) & 0o100
    elif keeper.user:
        assert (code, output) == (0, "one\n"), "times change through an open file"


def test_root_reads_what_anybody_may_read(keeper: Keeper) -> None:
    code, output = keeper.shell("cat /etc/shadow")
    assert code != 0 and ":" not in output.partition("denied")[0].removeprefix("cat: /etc/shadow:"), output
    assert "root:" in keeper.shell("cat /etc/passwd")[1]


def test_capabilities_are_gone(keeper: Keeper) -> None:
    code, output = keeper.run("cat", "/proc/self/status")
    held = {
        name: int(value, 16)
        for name, _, value in (line.partition(":") for line in output.splitlines())
        if name in ("CapInh", "CapPrm", "CapEff", "CapAmb")
    }
    assert code == 0 and held == dict.fromkeys(held, 0) and len(held) == 4, output
    assert "NoNewPrivs:\t1" in output and "Seccomp:\t2" in output


OUT = {
    "socket.socket(socket.AF_UNIX)": "EAFNOSUPPORT",
    "os.kill(keeper, 9)": "EPERM",
    "os.kill(keeper, 0)": "EPERM",
    "os.kill(-1, 9)": "EPERM",
    "os.pidfd_open(keeper)": "EPERM",
    "resource.prlimit(keeper, resource.RLIMIT_CPU, (1, 1))": "EPERM",
    "libc(250 if x86 else 219, 0, -3, 0)": "EPERM",  # keyctl
    "libc(425, 8, 0)": "ENOSYS",  # io_uring_setup
    "os.fchmod(os.open('/etc/passwd', os.O_RDONLY), 0o600)": "EPERM EROFS",
}
"""Calls that lead out of the folder, and what they fail with. `keeper` is out of sight in a PID namespace."""


def test_what_leads_out_is_refused(keeper: Keeper) -> None:
    calls = [call for call in OUT if ("keeper" not in call and "-1" not in call) or not keeper.namespaced]
    program = f"""
import ctypes, errno, os, resource, socket, sys
x86, keeper = {platform.machine() == "x86_64"}, os.getppid()
def libc(*given):
    if ctypes.CDLL(None, use_errno=True).syscall(*map(ctypes.c_long, given)) < 0:
        raise OSError(ctypes.get_errno(), "")
for call in {calls}:
    try:
        eval(call)
        print("done", flush=True)
    except OSError as error:
        print(errno.errorcode[error.errno], flush=True)
"""
    code, output = keeper.run(keeper.python, "-I", "-c", program)
    assert code == 0 and len(output.split()) == len(calls), output
    for call, said in zip(calls, output.split(), strict=True):
        assert said in OUT[call].split(), (call, said)


def test_socket_pairs_and_the_network_are_left(keeper: Keeper) -> None:
    program = "import socket; socket.socketpair(); socket.socket(); print(socket.gethostbyname('localhost'))"
    assert keeper.run(keeper.python, "-I", "-c", program) == (0, "127.0.0.1\n")


def sleepers(seconds: str) -> list[psutil.Process]:
    return [
        each
        for each in psutil.process_iter(["cmdline", "status"])
        if each.info["cmdline"] == ["sleep", seconds] and each.info["status"] != psutil.STATUS_ZOMBIE
    ]


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("how", ["confined", "free"])
def test_what_leaves_its_session_ends_with_the_command(keeper: Keeper, how: str) -> None:
    seconds = str(70_000 + os.getpid())
    line = f"setsid sleep {seconds} & (setsid setsid sleep {seconds} &) ; exit 3"
    code, output = keeper.run("/bin/sh", "-c", line, how=how)
    assert (code, output) == (3, "") and not sleepers(seconds)


@pytest.mark.parametrize("how", ["confined", "free"])
def test_a_keeper_that_is_asked_to_end_ends_all(keeper: Keeper, how: str) -> None:
    seconds = str(80_000 + os.getpid())
    line = f"setsid sleep {seconds} & (setsid setsid sleep {seconds} &) ; sleep {seconds}"
    with keeper.start("/bin/sh", "-c", line, how=how) as process:
        wait_for(lambda: len(sleepers(seconds)) == 3)
        process.terminate()
        assert process.wait(WAIT) == 128 + signal.SIGTERM
    assert not sleepers(seconds)


def test_what_forks_again_and_again_ends_too(keeper: Keeper) -> None:
    """Each process starts the next one and ends."""
    program = "import os\nprint('runs', flush=True)\nwhile True:\n if os.fork(): os._exit(0)\n os.setsid()"
    with keeper.start(keeper.python, "-I", "-S", "-c", program + "\n") as process:
        assert process.stdout is not None and process.stdout.readline() == "runs\n"
        process.terminate()
        process.wait(WAIT)
        assert process.stdout.read() == "", "nothing holds its output open"


def test_its_end_is_that_of_the_program(keeper: Keeper) -> None:
    assert keeper.shell("exit 7")[0] == 7
    assert keeper.shell("kill -9 $$")[0] == -9
    assert keeper.shell("kill -15 $$")[0] == -15
    assert keeper.run("/no/such/program") == (126, "/no/such/program: No such file or directory\n")
    assert keeper.shell("yes | head -n 1") == (0, "y\n")


def test_the_filter_knows_every_call_that_it_refuses() -> None:
    for machine in privileges._MACHINES.values():
        named = {*privileges._SHUT, *privileges._BY_DESCRIPTOR, *privileges._AIMED}
        assert named | {"socket", "ioctl", "utimensat", "prlimit64", "fchmodat"} <= machine.numbers.keys()
        assert len(set(machine.numbers.values())) == len(machine.numbers)
        for root in (True, False):
            made = privileges.program(machine, True, root, 7)
            assert len(made) % 8 == 0 and len(made) // 8 < 4096
