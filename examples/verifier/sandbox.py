"""Run a small Python program in a process of its own and see whether its answers are right.

The program never sees the expected answers: it is asked to evaluate calls, and what it says is compared here.
So it can't pass by ending early, by printing "ok", or by an object that is equal to everything.

What this keeps out: endless loops, memory and file hogs, floods of output, leftover processes, and the
variables of this process (where API keys are). It is no jail: the program has the same user, file system and
network, and may kill the process that keeps it. Programs from people who mean harm belong in a container or a
virtual machine.
"""

import ast
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import psutil

MAX_ANSWERS_BYTES = 1 << 20
END_S = 5.0  # for the kernel to end what was killed


@dataclass(frozen=True)
class Case:
    """One test: an expression over the program's names, and the value that it must have.

    Attributes:
        call: Such as `add(1, 2)`.
        expected: A value made of numbers (infinities and NaN, too), strings, bytes, booleans, None, and
            lists, tuples, sets and dicts of these.
    """

    call: str
    expected: Any


@dataclass(frozen=True)
class Submission:
    """A program and its tests."""

    name: str
    program: str
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Limits:
    """What one program may use.

    Attributes:
        wall_s: Seconds from start to end.
        cpu_s: Seconds of CPU time, whole ones.
        memory_bytes: Address space.
        file_bytes: Size of each file that it writes.
        open_files: Open file descriptors.
    """

    wall_s: float = 5.0
    cpu_s: int = 2
    memory_bytes: int = 512 << 20
    file_bytes: int = 4 << 20
    open_files: int = 64


@dataclass(frozen=True)
class Verdict:
    """What became of a program.

    Attributes:
        status: `passed`; `wrong` (an answer is); `raised` (the program, or a call, did); `timeout`; or
            `killed` (it ended before it had answered, as programs do that use too much).
        passed: Number of right answers.
        total: Number of tests.
        detail: The first thing that went wrong.
    """

    status: Literal["passed", "wrong", "raised", "timeout", "killed"]
    passed: int
    total: int
    detail: str = ""

    @property
    def reward(self) -> float:
        """1 if every test passed, else 0."""
        return float(self.status == "passed")


class NoTestsError(ValueError):
    """A program without tests can't be verified: nothing it does would count against it."""


def verify(submission: Submission, limits: Limits = Limits()) -> Verdict:
    """Run a program and compare its answers.

    Raises:
        NoTestsError: There are no tests.
        TypeError: A test expects what no program can say.
    """
    if not submission.cases:
        raise NoTestsError(f"{submission.name!r} has no tests; it would pass whatever it does")
    for case in submission.cases:
        _check_plain(case.call, case.expected)
    with tempfile.TemporaryDirectory(prefix="verify-") as folder, tempfile.TemporaryFile() as answers:
        status = _run(submission, limits, folder, answers.fileno())
        answers.seek(0)
        said = answers.read(MAX_ANSWERS_BYTES).decode("utf-8", "replace").split("\n")[:-1]
    return judge(submission.cases, said, status)


def judge(cases: Sequence[Case], said: Sequence[str], status: int | None) -> Verdict:
    """Compare what a program said, one line per call, with what was expected.

    Args:
        cases: The tests.
        said: Lines of the program's process, as many as it got done.
        status: Its exit status, negative for a signal; None if it ran out of time.
    """
    passed, first, worst = 0, "", None
    for case, line in zip(cases, said, strict=False):
        answer, error = _read(line)
        if error is None and _same(answer, case.expected):
            passed += 1
            continue
        worst = worst or ("raised" if error else "wrong")
        first = first or f"{case.call}: {error or f'{answer!r:.200}, not {case.expected!r:.200}'}"
    if len(said) < len(cases) or status != 0:
        at = f"at {cases[len(said)].call}" if len(said) < len(cases) else "after its answers"
        if status is None:
            return Verdict("timeout", passed, len(cases), f"out of time {at}")
        how = f"ended with exit code {status}" if status >= 0 else f"killed by {_signal_name(-status)}"
        return Verdict("killed", passed, len(cases), f"{how} {at}")
    return Verdict(worst or "passed", passed, len(cases), first)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most of those for real time have none
        return f"signal {number}"


def _run(submission: Submission, limits: Limits, folder: str, answers_fd: int) -> int | None:
    """Exit status of the program's process, None if it ran out of time."""
    order = {
        "program": submission.program,
        "calls": [case.call for case in submission.cases],
        "limits": [limits.cpu_s, limits.memory_bytes, limits.file_bytes, limits.open_files],
        "answers": answers_fd,
    }
    keeper = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", "-c", _INSIDE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={"LANG": "C.UTF-8"},  # nothing of ours
        pass_fds=[answers_fd],
        start_new_session=True,
    )
    try:
        with contextlib.suppress(BrokenPipeError):  # it stays open for as long as this process is there
            keeper.stdin.write(json.dumps(order).encode() + b"\n")  # type: ignore[union-attr]
            keeper.stdin.flush()  # type: ignore[union-attr]
        with keeper.stdout as told:  # type: ignore[union-attr]
            if not _readable(told.fileno(), limits.wall_s):
                return None
            status = told.readline()
        return int(status) if status.endswith(b"\n") else keeper.wait()
    finally:
        _end(keeper)
        with contextlib.suppress(BrokenPipeError):
            keeper.stdin.close()  # type: ignore[union-attr]


def _readable(fd: int, wait_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(1000 * wait_s))


def _end(keeper: subprocess.Popen[bytes]) -> None:
    """Kill all that is below the keeper, in whatever session; it ends when nothing is left there."""
    deadline = time.monotonic() + END_S
    while keeper.poll() is None:
        if time.monotonic() > deadline:
            keeper.kill()
            keeper.wait()
            raise RuntimeError(f"what the program started can't be ended within {END_S:g} s")
        for process in psutil.Process(keeper.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _await_end(keeper.pid, 0.01)


def _await_end(pid: int, wait_s: float) -> None:
    ended = os.pidfd_open(pid)  # unlike Popen.wait(timeout), it does not poll
    try:
        _readable(ended, wait_s)
    finally:
        os.close(ended)


def _read(line: str) -> tuple[Any, str | None]:
    """A line's value, or what went wrong with it."""
    try:
        kind, text = json.loads(line)
        if kind == "raised":
            return None, str(text)
        return ast.literal_eval(_Numbers().visit(ast.parse(text, mode="eval"))), None
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None, f"no plain value: {line:.200}"


class _Numbers(ast.NodeTransformer):
    """Numbers that are written like names."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """An infinity or NaN, real or imaginary; other names are no values."""
        if node.id in ("inf", "nan"):
            return ast.Constant(float(node.id))
        return ast.Constant(complex(node.id)) if node.id in ("infj", "nanj") else node


def _same(answer: Any, expected: Any) -> bool:
    """Equal, and of the same types throughout: True is not 1 here. NaN is the same as NaN."""
    return bool(_typed(answer) == _typed(expected))


def _typed(value: Any) -> tuple[Any, ...]:
    """What is equal for values that are the same; it can be hashed, as parts of sets and keys are."""
    kind = type(value)
    if kind in (list, tuple):
        return kind, tuple(map(_typed, value))
    if kind is set:
        return kind, frozenset(map(_typed, value))
    if kind is dict:
        return kind, frozenset((_typed(key), _typed(item)) for key, item in value.items())
    if kind is complex:
        return kind, _typed(value.real), _typed(value.imag)
    return (kind, "nan") if value != value else (kind, value)


def _check_plain(call: str, expected: Any) -> None:
    if type(expected) is dict:
        parts = [*expected, *expected.values()]
    elif type(expected) in (list, tuple, set):
        parts = [*expected]
    elif type(expected) in (int, float, complex, str, bytes, bool, type(None)):
        parts = []
    else:
        raise TypeError(f"{call}: no program can say {expected!r:.200}, a {type(expected).__name__}")
    for part in parts:
        _check_plain(call, part)


# The process that is started is the keeper: orphans of all that is below it come to it, and it ends after
# them. The program runs in its child, whose exit status it tells, and whose standard output leads nowhere.
# The keeper's standard input ends with whoever has started it, of whatever that died: then all is killed.
_INSIDE = """
import contextlib, ctypes, json, os, resource, signal, sys, threading, time
order = json.loads(sys.stdin.readline())
gone = contextlib.suppress(FileNotFoundError, ProcessLookupError)  # children that are waited for meanwhile
def end():
    os.read(0, 1)
    while True:
        for thread in os.listdir("/proc/self/task"):
            with gone, open(f"/proc/self/task/{thread}/children") as children:
                for child in children.read().split():
                    with gone:
                        os.kill(int(child), signal.SIGKILL)
        time.sleep(0.01)
control = ctypes.CDLL(None).prctl
control(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
program = os.fork()
if program:
    os.close(order["answers"])
    threading.Thread(target=end, daemon=True).start()
    status = os.waitpid(program, 0)[1]
    try:
        os.write(1, b"%d\\n" % os.waitstatus_to_exitcode(status))
    except BrokenPipeError:  # its time was over: what it has left behind is waited for all the same
        pass
    try:
        while True:
            os.wait()
    except ChildProcessError:
        os._exit(0)
control(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
os.setsid()
cpu_s, memory, file_size, files = order["limits"]
for limit, most in (
    (resource.RLIMIT_CPU, cpu_s),
    (resource.RLIMIT_AS, memory),
    (resource.RLIMIT_FSIZE, file_size),
    (resource.RLIMIT_NOFILE, files),
    (resource.RLIMIT_CORE, 0),
):
    grace = limit == resource.RLIMIT_CPU  # so that a signal with a name comes first
    resource.setrlimit(limit, (most, most + grace))
answers = os.fdopen(order["answers"], "w")
nowhere = os.open(os.devnull, os.O_RDWR)
os.dup2(nowhere, 0)
os.dup2(nowhere, 1)
names = {"__name__": "program"}
broken = None
try:
    exec(compile(order["program"], "program", "exec"), names)
except BaseException as error:
    broken = f"{type(error).__name__}: {error}"
for call in order["calls"]:
    if broken is None:
        try:
            line = ["value", repr(eval(call, names))]
        except BaseException as error:
            line = ["raised", f"{type(error).__name__}: {error}"]
    else:
        line = ["raised", broken]
    answers.write(json.dumps(line) + "\\n")
    answers.flush()
os._exit(0)
"""
