"""The fork server of the driver `zygote`: an interpreter that becomes programs, which can split.

    python -I zygote.py FD     FD: a SOCK_SEQPACKET to the host, which ends the server by closing it

To the server come requests to start a program (JSON, with its three standard streams and a control
socket); from it come `PID STATUS` of each program that ended. A program says its pid on its control
socket and waits for one byte. To split it, the host puts a request per branch there and sends
SIGUSR1: the handler forks all branches between two instructions of the program, then answers `ok`
or why not. A branch is a child of the server, moves to its own folder, opens the files below
the old one again at their offsets in the new one, and introduces itself on a control socket of its
own. Pipes and sockets that a program opened stay shared with its branches.
"""

import code
import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import stat
import sys
import time
import types

MAX_BYTES = 1 << 18
NUM_ENDS = 4  # standard input, output, error, control
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SYS_CLONE = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
CLONE_PARENT = 0x8000
LIBC = ctypes.PyDLL(None)  # calls keep the interpreter's lock, as a fork must
PRCTL = LIBC.prctl
# Of a file's open flags, those that hold for it once it is there.
KEPT_FLAGS = ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC)


class Program:
    """What this process is, once it is a program."""

    control: socket.socket
    root: str
    server: int
    is_splitting = False


def serve(host: socket.socket) -> None:
    """Fork a program per request; returns in each of them, with its words."""
    Program.server = os.getpid()
    PRCTL(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGCHLD, lambda signo, frame: report_ends(host))
    while True:
        request, ends = receive(host)
        if request is None:
            os._exit(0)  # programs die with their parent
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            host.close()
            begin(request, ends)
            sys.exit(run(request["argv"]))
        for fd in ends:
            os.close(fd)


def report_ends(host: socket.socket) -> None:
    """Tell the host of every program that ended."""
    with contextlib.suppress(ChildProcessError, ConnectionError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            host.send(b"%d %d" % ended)


def receive(end: socket.socket) -> tuple[dict | None, list[int]]:
    """A request and its descriptors; None if the other end is closed."""
    data, fds, _, _ = socket.recv_fds(end, MAX_BYTES, NUM_ENDS, socket.MSG_CMSG_CLOEXEC)
    return (json.loads(data) if data else None), fds


def begin(request: dict, ends: list[int]) -> None:
    """Be a program of its own: streams, bounds, folder, environment."""
    take(request, ends)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    for name, value in request["bounds"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    signal.signal(signal.SIGUSR1, split)
    introduce()


def take(request: dict, ends: list[int]) -> None:
    """Make the four ends its own."""
    os.setsid()
    for target, fd in enumerate(ends[:3]):
        os.dup2(fd, target)
        os.close(fd)
    Program.control = socket.socket(fileno=ends[3])
    Program.root = request["root"]


def introduce() -> None:
    """Tell the host who this is, and wait until it has heard; it may have given up.

    A request to split that follows at once waits, else it would be met here.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    while os.getppid() != Program.server:
        time.sleep(0.0002)
    PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        Program.control.send(b"%d" % os.getpid())
        is_known = bool(Program.control.recv(1))
    except ConnectionError:
        is_known = False
    if not is_known or os.getppid() != Program.server:
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def run(argv: list[str]) -> int:
    """The words after `python3`, in a module of its own; returns the exit code."""
    words = [word for word in argv if word not in ("-u", "-i")]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["-c", *words[2:]] if words[:1] == ["-c"] else words or [""]
    try:
        if not words:
            sys.ps1 = sys.ps2 = ""
            code.InteractiveConsole(module.__dict__).interact(banner="", exitmsg="")
        elif words[0] == "-c":
            sys.path.insert(0, "")
            exec(compile(words[1], "<string>", "exec"), module.__dict__)
        else:
            sys.path.insert(0, os.path.dirname(words[0]))
            module.__file__ = words[0]
            with open(words[0], "rb") as source:
                exec(compile(source.read(), words[0], "exec"), module.__dict__)
    except SystemExit:
        raise
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:  # any error of the program, as the interpreter reports it
        frames = error.__traceback__
        error.__traceback__ = frames and frames.tb_next  # without this file's own
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def split(signo: int, frame: object) -> None:
    """Do what waits, between two instructions of the program.

    The host signals until it is answered: Python notices a signal that comes just before a read
    begins only when the read ends, or is interrupted by another. So one may come for nothing.
    """
    if Program.is_splitting:
        return
    Program.is_splitting = True
    try:
        if select.select([Program.control], [], [], 0)[0]:
            fork_branches()
    finally:
        Program.is_splitting = False


def fork_branches() -> None:
    """Fork a branch per request that waits, and answer."""
    reason = refusal()
    while True:
        request, ends = receive(Program.control)
        if request is None:
            return
        pid = -1 if reason else fork_sibling()
        if pid == 0:
            branch(request, ends)
            return
        if pid < 0:
            reason = reason or "it cannot fork: too many processes, or no memory left"
        for fd in ends:
            os.close(fd)
        if request["is_last"]:
            break
    Program.control.send(reason.encode() or b"ok")


def fork_sibling() -> int:
    """`os.fork`, but the child's parent is that of this process: the server, which hears its end.

    The other way there, to fork twice and end the one between, copies the page tables twice (best
    of nine with 200 MB: 9.7 ms, not 2.4). Safe in a program of one thread: no other holds a lock.
    """
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = LIBC.syscall(SYS_CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return pid


def refusal() -> str:
    """Why this program cannot be split; empty if it can. That it has one thread, the host saw."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return "it has child processes, which a branch would not have"
    return ""


def branch(request: dict, ends: list[int]) -> None:
    """Go on as another sandbox's program."""
    old, new = Program.root, request["root"]
    place = os.path.relpath(os.getcwd(), old)
    Program.control.close()
    move_files(old, new)
    take(request, ends)
    os.environ.update(request["env"])
    os.chdir(new if place.startswith("..") else os.path.join(new, place))
    introduce()


def move_files(old: str, new: str) -> None:
    """Open again, below `new`, what is open below `old`; a deleted file stays shared."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
            is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        except OSError:  # the listing's own
            continue
        if not is_file or not path.startswith(f"{old}/") or not os.path.exists(path):
            continue
        with open(f"/proc/self/fdinfo/{fd}") as lines:
            facts = dict(line.split(":\t") for line in lines if line.startswith(("pos", "flags")))
        opened = os.open(new + path[len(old) :], int(facts["flags"], 8) & KEPT_FLAGS)
        os.lseek(opened, int(facts["pos"]), os.SEEK_SET)
        os.dup2(opened, fd, inheritable=os.get_inheritable(fd))
        os.close(opened)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
