"""A Python interpreter in a process of its own, with limits: what an agent's programs run in.

It keeps out endless loops, memory hogs, files, floods of output, other processes, signals to them (sent, or
had sent as the owners of descriptors), changes of its limits and theirs, and the variables of this process
(where API keys are). It ends with this process, also where that is killed. It is no jail: a program has the
same user, file system and network. Programs from people who mean harm belong in a container or a virtual
machine.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from dataclasses import astuple, dataclass
from typing import Self

MAX_ANSWER = 1000
LINE_BYTES = 64 << 10


@dataclass(frozen=True)
class Limits:
    """What one interpreter may use.

    Attributes:
        cpu_s: Seconds of CPU time, for all of its programs together.
        memory_bytes: Address space.
        file_bytes: Size of each file that it writes.
        open_files: Open file descriptors.
        wall_s: Seconds that one program may take.
    """

    cpu_s: int = 5
    memory_bytes: int = 256 << 20
    file_bytes: int = 0
    open_files: int = 32
    wall_s: float = 5.0


@dataclass(frozen=True)
class Answer:
    """What became of a program.

    Attributes:
        value: The `repr` of an expression's value, cut off; empty after statements.
        error: What went wrong, if something did.
    """

    value: str = ""
    error: str = ""


class EndedError(Exception):
    """The interpreter has ended: a program used too much of something, or exited."""


class Interpreter:
    """Runs one program after another; names stay from one to the next. Programs take turns."""

    def __init__(self, process: Process, limits: Limits) -> None:
        self._process, self._limits = process, limits
        self._turn = asyncio.Lock()

    @classmethod
    async def start(cls, limits: Limits = Limits()) -> Self:
        """Start one, in a session of its own and with nothing of this process's environment."""
        python = [sys.executable, "-I", "-S", "-B", "-c", _INSIDE, json.dumps(astuple(limits)[:4])]
        process = await asyncio.create_subprocess_exec(
            *python,
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            cwd="/",
            env={"LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "1"},  # a thread takes next to nothing of the memory
            start_new_session=True,
            limit=LINE_BYTES,
        )
        return cls(process, limits)

    async def run(self, program: str) -> Answer:
        """Evaluate an expression, or run statements.

        Raises:
            EndedError: It ended before it had answered, or was ended as it took too long.
        """
        async with self._turn:
            try:
                async with asyncio.timeout(self._limits.wall_s):
                    return await self._ask(program)
            except TimeoutError:
                await self.close()
                raise EndedError(f"the program took longer than {self._limits.wall_s:g} s") from None
            except (ConnectionError, ValueError, TypeError):
                await self.close()
                raise EndedError(
                    "the interpreter ended: too much time, memory or output, or an exit"
                ) from None
            except asyncio.CancelledError:
                self._kill()  # the next program would get this one's answer
                raise

    async def _ask(self, program: str) -> Answer:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None or self._process.returncode is not None:
            raise ConnectionError
        stdin.write(json.dumps(program).encode() + b"\n")
        await stdin.drain()
        return Answer(**json.loads(await stdout.readline()))

    async def close(self) -> None:
        """End it, with the processes of its group; idempotent."""
        self._kill()
        await self._process.wait()

    def _kill(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


# Refuses, from now on, to start processes, threads and programs, to send signals or have them sent (to the
# owners of descriptors), and to look at limits or change them. The limit alone would not bind root, so the
# kernel is given a filter of system calls, by their numbers.
_ALONE = """
import ctypes, platform, resource, struct
LOAD, IF_EQUAL, IF_AT_LEAST, RETURN, ALLOWED, REFUSED = 0x20, 0x15, 0x35, 0x06, 0x7FFF0000, 0x00050001
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
machines = {
    # clone, fork, vfork, execve, execveat, clone3; kill, tkill, tgkill, (tg)sigqueue, pidfd, ptrace;
    # setrlimit, prlimit; fcntl, ioctl
    "x86_64": (
        0xC000003E, (56, 57, 58, 59, 322, 435), (62, 200, 234, 129, 297, 424, 101), (160, 302), (72, 16)
    ),
    # clone, execve, execveat, clone3; the same
    "aarch64": (
        0xC00000B7, (220, 221, 281, 435), (129, 130, 131, 138, 240, 424, 117), (164, 261), (25, 29)
    ),
}
if platform.machine() in machines:
    machine, starts, signals, limits, commands = machines[platform.machine()]
    owners = 8, 15, 0x8901, 0x8902  # F_SETOWN, F_SETOWN_EX; FIOSETOWN, SIOCSPGRP
    steps = [(LOAD, 0, 0, 4), (IF_EQUAL, 0, "refused", machine), (LOAD, 0, 0, 0)]
    steps += [(IF_AT_LEAST, "refused", 0, 1 << 30)]
    steps += [(IF_EQUAL, "refused", 0, call) for call in starts + signals + limits]
    steps += [(IF_EQUAL, 1, 0, commands[0]), (IF_EQUAL, 0, "allowed", commands[1]), (LOAD, 0, 0, 24)]
    steps += [(IF_EQUAL, "refused", 0, command) for command in owners]
    steps += [(RETURN, 0, 0, ALLOWED), (RETURN, 0, 0, REFUSED)]
    ends = {"allowed": len(steps) - 2, "refused": len(steps) - 1}
    steps = [
        (kind, *(ends[to] - n - 1 if to in ends else to for to in jumps), value)
        for n, (kind, *jumps, value) in enumerate(steps)
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]
    control = ctypes.CDLL(None).prctl
    control(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    control(22, 2, ctypes.byref(Filter(len(steps), ctypes.addressof(code))), 0, 0)  # PR_SET_SECCOMP
"""

# Programs are read from, and answers told to, descriptors that are no longer standard input and output. Where
# the one for programs ends in the midst of one, as the server was killed, a thread ends the process.
_INSIDE = f"""
import json, os, resource, select, sys, threading
kinds = resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE
for kind, most in zip(kinds, json.loads(sys.argv[1])):
    resource.setrlimit(kind, (most, most))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
programs, told = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
nowhere = os.open(os.devnull, os.O_RDWR)
os.dup2(nowhere, 0)
os.dup2(nowhere, 1)
server = select.poll()
server.register(programs, 0)
threading.stack_size(256 << 10)
threading.Thread(target=lambda end=os._exit: (server.poll(), end(0)), daemon=True).start()
exec({_ALONE!r}, {{}})

def answered(program, names):
    try:
        try:
            code, is_value = compile(program, "program", "eval"), True
        except SyntaxError:
            code, is_value = compile(program, "program", "exec"), False
        value = eval(code, names)
        return {{"value": repr(value)[:{MAX_ANSWER}] if is_value else ""}}
    except BaseException as error:
        return {{"error": f"{{type(error).__name__}}: {{error}}"[:{MAX_ANSWER}]}}

names = {{"__name__": "program"}}
for line in programs:
    told.write(json.dumps(answered(json.loads(line), names)) + "\\n")
    told.flush()
"""
