"""`raycrew run`: the command's streams, signals and exit codes are those of a command that runs alone."""

import contextlib
import json
import os
import pty
import select
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from commanding import eventually, finished, is_running, kill, python, running, state, told, words

from raycrew.cluster_core.__main__ import main
from raycrew.cluster_core._command_line.running import keeping

pytestmark = pytest.mark.hostile

NOTES = """
    import os, signal, sys, time
    def note(number, frame):
        print(signal.Signals(number).name, flush=True)
        if number == signal.SIGTERM:
            sys.exit(7)
    for one in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        signal.signal(one, note)
    print(os.getpid(), flush=True)
    while True:
        signal.pause()
"""
STUBBORN = """
    import os, signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(os.getpid(), flush=True)
    while True:
        signal.pause()
"""


@pytest.mark.smoke
def test_a_command_gets_its_arguments_input_and_cluster_and_gives_its_code(tmp_path):
    code = """
        import os, sys
        from pathlib import Path
        token, shown = os.environ["RAY_AUTH_TOKEN"], []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                shown += [process.name] if token in (process / "cmdline").read_text() else []
            except (OSError, UnicodeDecodeError):
                pass  # Another one's, or ended.
        print(sys.argv[1:], sys.stdin.read(), os.environ["RAY_ADDRESS"], len(token), shown)
        print("to the other stream", file=sys.stderr)
        sys.exit(3)
    """
    done = finished(tmp_path, "num_cpus=2", "--", *python(code), "-x", "--", "--json", "é", input="given")
    assert done.returncode == 3
    assert done.stdout == "['-x', '--', '--json', 'é'] given h:1 20 []\n"
    line, other = done.stderr.splitlines()
    assert line == "raycrew run: started a cluster at h:1, which ends with the command (said so)"
    assert other == "to the other stream" and "hush" not in done.stderr
    assert json.loads((tmp_path / "asked").read_text())["start"] == {"num_cpus": 2}
    assert (tmp_path / "ended").exists()


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 125, "which command?"),
        (("--",), 125, "which command?"),
        (("python", "x.py"), 125, "It stands behind --"),
        (("--num-cpu", "1", "--", "true"), 125, "--num-cpu"),
        (("--num-cpus", "few", "--", "true"), 125, "invalid int value: 'few'"),
        (("--grace", "-1", "--", "true"), 125, "--grace"),
        (("num_cpu=1", "--", "true"), 125, "unknown configuration ['num_cpu']"),
        (("num_cpus=few", "--", "true"), 125, "num_cpus is"),
        (("num_cpus=[", "--", "true"), 125, "override of num_cpus has a value that is not YAML"),
        (("namespace=x", "num_nodes=4", "--", "true"), 125, "namespace, num_nodes would say nothing"),
        (("--config", "/none.yaml", "--", "true"), 125, "No such file"),
        (("--env-file", "/none.yaml", "--", "true"), 125, "No such file"),
        (("--", "surely-no-such-command"), 127, "no such command"),
        (("--", "/none/command"), 127, "no such command"),
        (("--", ""), 127, "no such command"),
        (("--", "./plain"), 126, "not executable"),
        (("--", "/"), 126, "not executable"),
    ],
)
def test_what_cannot_be_run_is_told_before_a_cluster_is_asked_for(
    arguments, code, said, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(keeping, "_COMMAND", ("touch", "asked"))
    (tmp_path / "plain").touch(mode=0o600)
    try:
        assert main(["run", *arguments]) == code
    except SystemExit as end:
        assert end.code == code
    told_of = capsys.readouterr()
    assert told_of.out == "" and said in told_of.err and not (tmp_path / "asked").exists()


def test_a_script_without_its_interpreter_is_not_found(tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/surely/not/there\n")
    broken.chmod(0o700)
    done = finished(tmp_path, "--", str(broken))
    assert done.returncode == 127 and str(broken) in done.stderr and (tmp_path / "ended").exists()
    assert "Traceback" not in done.stderr


@pytest.mark.smoke
def test_no_cluster_no_command(tmp_path):
    (tmp_path / "refuse").touch()
    done = finished(tmp_path, "--", "touch", str(tmp_path / "ran"))
    assert (done.returncode, done.stderr) == (125, "raycrew run: there is none\nstart one\n")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_that_ends_the_command_is_in_the_code(number, tmp_path):
    done = finished(tmp_path, "--", *python(f"import os; os.kill(os.getpid(), {int(number)})"))
    assert done.returncode == 128 + number


def test_each_signal_reaches_the_command_once(tmp_path):
    with running(tmp_path, "--", *python(NOTES), start_new_session=True) as process:
        told(process)
        for name in ("SIGINT", "SIGUSR1", "SIGQUIT", "SIGUSR2", "SIGHUP", "SIGINT"):
            kill(process.pid, getattr(signal, name))
            assert told(process) == name
        os.killpg(process.pid, signal.SIGINT)  # As a terminal does it, or a shell with a job.
        assert told(process) == "SIGINT"
        kill(process.pid, signal.SIGTERM)
        assert told(process) == "SIGTERM"
        assert process.wait(60) == 7
        assert process.stdout.read() == ""


def test_a_signal_to_a_job_that_is_only_just_forking_does_not_come_twice(tmp_path):
    """What is forked is of the job still, with its parent's handlers; what the parent gets is passed on."""
    where = """
        import os, signal
        from raycrew.cluster_core._command_line.running import child
        begin = child._asked_to_end_with_this_process
        def late(*arguments):
            begun = begin(*arguments)
            def signalled():
                os.kill(os.getpid(), signal.SIGUSR1)
                begun()
            return signalled
        child._asked_to_end_with_this_process = late
    """
    with running(tmp_path, "--", *python(NOTES), where=where) as process:
        assert told(process).isdigit()
        process.send_signal(signal.SIGTERM)
        assert told(process) == "SIGTERM"
        assert process.wait(60) == 7


def test_a_command_that_ignores_the_wish_is_killed_with_all_of_its_group(tmp_path):
    code = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {python(STUBBORN)[2]!r}])\n"
    with running(tmp_path, "--grace", "0.3", "--", *python(code + python(STUBBORN)[2])) as process:
        pids = [int(told(process)), int(told(process))]
        kill(pids[0], signal.SIGSTOP)
        kill(process.pid, signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGKILL
        eventually(lambda: not any(map(is_running, pids)))


def test_what_is_killed_takes_along_what_it_started_in_other_groups(tmp_path):
    """As a run within a run does, whose own time is longer."""
    inner = words(tmp_path, "--grace", "600", "--", *python(STUBBORN))
    with running(tmp_path, "--grace", "0.3", "--", *inner) as process:
        stubborn = int(told(process))
        kill(process.pid, signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGKILL
        try:
            eventually(lambda: not is_running(stubborn), 20)
        finally:
            with contextlib.suppress(ProcessLookupError):
                kill(stubborn, signal.SIGKILL)


def test_what_a_command_leaves_in_its_group_is_ended(tmp_path):
    code = f"""
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", {python(STUBBORN)[2]!r}], stdout=subprocess.PIPE)
        print(child.stdout.readline().decode(), flush=True)
        sys.exit(5)
    """
    with running(tmp_path, "--grace", "0.3", "--", *python(code)) as process:
        left = int(told(process))
        assert process.wait(60) == 5
        eventually(lambda: not is_running(left))


def test_what_a_command_leaves_hears_of_the_end_though_it_is_stopped(tmp_path):
    # Of a group whose last tie to its session ends while somebody in it is stopped, the kernel hangs up.
    left = "trap 'touch heard; exit' TERM HUP; echo up; while :; do sleep 0.1; done"
    (tmp_path / "left").write_text(left)
    command = f"cd {tmp_path}; sh left & read go; kill -STOP $!; exit 5"
    with running(tmp_path, "--grace", "600", "--", "sh", "-c", command, stdin=subprocess.PIPE) as process:
        assert told(process) == "up"
        process.communicate("go\n", timeout=60)
        assert process.returncode == 5 and (tmp_path / "heard").exists()


def test_a_signal_after_the_commands_end_cuts_short_what_is_waited_for(tmp_path):
    (tmp_path / "stay").touch()
    code = f"""
        import os, subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", {python(STUBBORN)[2]!r}], stdout=subprocess.PIPE)
        print(child.stdout.readline().decode().strip(), os.getpid(), flush=True)
        sys.exit(5)
    """
    where = "from raycrew.cluster_core._command_line.running import keeping; keeping._END_S = 600.0"
    with running(tmp_path, "--grace", "600", "--", *python(code), where=where) as process:
        left, command = map(int, told(process).split())
        eventually(lambda: not Path(f"/proc/{command}").exists())
        kill(process.pid, signal.SIGINT)
        eventually(lambda: not is_running(left))
        eventually((tmp_path / "staying").exists)
        kill(process.pid, signal.SIGTERM)
        assert process.wait(60) == 5 and not (tmp_path / "ended").exists()


ADOPTS = "import ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER"


def test_as_the_first_process_of_a_container_it_reaps_what_it_adopts(tmp_path):
    leave = "(sleep 0 & echo $!) && sleep 600 & read go; exit 5"
    with running(
        tmp_path, "--grace", "600", "--", "sh", "-c", leave, where=ADOPTS, stdin=subprocess.PIPE
    ) as process:
        adopted = int(told(process))
        eventually(lambda: not Path(f"/proc/{adopted}").exists())
        process.communicate("go\n", timeout=60)
        assert process.returncode == 5


def test_what_may_not_be_listed_keeps_nothing_from_being_killed(tmp_path):
    where = """
        import psutil
        def denied(*_, **__):
            raise psutil.AccessDenied(1)
        psutil.Process.children = denied
    """
    with running(tmp_path, "--grace", "0.3", "--", *python(STUBBORN), where=where) as process:
        stubborn = int(told(process))
        kill(process.pid, signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGKILL
        eventually(lambda: not is_running(stubborn))


def test_an_error_of_its_own_leaves_no_command_behind(tmp_path):
    where = """
        from raycrew.cluster_core._command_line.running.child import Child
        def fails(*_):
            raise RuntimeError("unforeseen")
        Child._pass_on = fails
    """
    with running(tmp_path, "--", *python(STUBBORN), where=where) as process:
        stubborn = int(told(process))
        kill(process.pid, signal.SIGUSR1)
        assert process.wait(60) == 1 and "unforeseen" in process.stderr.read()
        eventually(lambda: not is_running(stubborn))


def test_nothing_is_killed_by_the_number_of_a_group_that_is_empty(tmp_path):
    where = """
        import os, sys
        real = os.killpg
        def killpg(group, number):
            with open(sys.argv[2] + "/sent", "a") as file:
                print(int(number), file=file)
            real(group, number)
        os.killpg = killpg
    """
    with running(tmp_path, "--", "true", where=where) as process:
        assert process.wait(60) == 0
    assert str(int(signal.SIGKILL)) not in (tmp_path / "sent").read_text().split()


def test_a_killed_run_ends_its_cluster_and_asks_the_command_to_end(tmp_path):
    with running(tmp_path, "--", *python(NOTES)) as process:
        child = int(told(process))
        process.kill()
        assert told(process) == "SIGTERM"
        eventually(lambda: not is_running(child) and (tmp_path / "ended").exists())


def test_an_end_before_there_is_a_cluster(tmp_path):
    (tmp_path / "hang").touch()
    for number in (signal.SIGINT, signal.SIGTERM):
        with running(tmp_path, "--", "touch", str(tmp_path / "ran")) as process:
            eventually((tmp_path / "hanging").exists)
            kill(process.pid, number)
            assert process.wait(60) == 128 + number
        (tmp_path / "hanging").unlink()
    assert not (tmp_path / "ran").exists()


def test_what_is_ignored_stays_ignored(tmp_path):
    def ignore():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    code = "import os, signal; print(os.getpid(), signal.getsignal(signal.SIGHUP).name, flush=True); input()"
    with running(tmp_path, "--", *python(code), stdin=subprocess.PIPE, preexec_fn=ignore) as process:
        assert told(process).split()[1] == "SIG_IGN"
        kill(process.pid, signal.SIGHUP)
        assert process.communicate("on\n", timeout=60)[0] == ""
        assert process.returncode == 0


def test_stopping_and_continuing(tmp_path):
    with running(tmp_path, "--", *python(NOTES)) as process:
        child = int(told(process))
        kill(process.pid, signal.SIGTSTP)
        eventually(lambda: (state(process.pid), state(child)) == ("T", "T"))
        kill(process.pid, signal.SIGCONT)
        eventually(lambda: "T" not in (state(process.pid), state(child)))
        kill(child, signal.SIGSTOP)  # By somebody else, who continues it: this one waits on.
        eventually(lambda: state(child) == "T")
        kill(child, signal.SIGCONT)
        kill(process.pid, signal.SIGSTOP)
        kill(process.pid, signal.SIGTERM)
        kill(process.pid, signal.SIGCONT)
        assert process.wait(60) == 7


def test_a_signal_that_comes_as_the_command_ends(tmp_path):
    with running(tmp_path, "--", *python(NOTES)) as process:
        child = int(told(process))
        kill(process.pid, signal.SIGSTOP)
        eventually(lambda: state(process.pid) == "T")
        kill(child, signal.SIGKILL)
        eventually(lambda: state(child) == "Z")
        kill(process.pid, signal.SIGTERM)
        kill(process.pid, signal.SIGCONT)
        assert process.wait(60) == 128 + signal.SIGKILL


def test_a_line_that_nobody_reads_keeps_no_command_from_running(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    done = finished(
        tmp_path, "--", "echo", "ran", capture_output=False, stdout=subprocess.PIPE, stderr=writing
    )
    os.close(writing)
    assert (done.returncode, done.stdout) == (0, "ran\n")
    script = '"$0" "$@" 2>&-'
    shell = subprocess.run(
        ["sh", "-c", script, *words(tmp_path, "--", "echo", "ran")],
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert (shell.returncode, shell.stdout) == (0, "ran\n")


def test_a_line_for_which_there_is_no_room_keeps_no_command_from_running(tmp_path):
    reading, writing = os.pipe2(os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while os.write(writing, bytes(4096)):
            pass
    os.set_blocking(writing, True)
    done = finished(
        tmp_path,
        "--",
        "echo",
        "ran",
        capture_output=False,
        stdout=subprocess.PIPE,
        stderr=writing,
        timeout=60,
    )
    os.close(reading)
    os.close(writing)
    assert (done.returncode, done.stdout) == (0, "ran\n")


def test_a_reader_that_has_enough_ends_the_command_as_it_would_alone(tmp_path):
    with running(tmp_path, "--", "yes") as process:
        assert told(process) == "y"
        process.stdout.close()
        process.stdout = None
        assert process.wait(60) == 128 + signal.SIGPIPE


def test_two_in_one_folder(tmp_path):
    with running(tmp_path, "--", *python(NOTES)) as one, running(tmp_path, "--", *python(NOTES)) as two:
        for process in (one, two):
            told(process)
            kill(process.pid, signal.SIGTERM)
            assert process.wait(60) == 7


def test_a_cluster_that_ends_early_is_told_of(tmp_path):
    code = "import os; print(os.getpid(), flush=True); input()"
    with running(tmp_path, "--", *python(code), stdin=subprocess.PIPE) as process:
        child = int(told(process))
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        (keeper,) = set(map(int, children.split())) - {child}
        kill(keeper, signal.SIGKILL)
        eventually(lambda: not is_running(keeper))
        said = process.communicate("on\n", timeout=60)[1]
        assert process.returncode == 0 and "the cluster at h:1 ended before the command did" in said


class Screen:
    """What is seen on a pseudo-terminal, from one thing to the next."""

    def __init__(self, arguments):
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.execvpe(arguments[0], arguments, {**os.environ, "PS1": "what next?"})
        self.seen = b""

    def see(self, text):
        while text not in self.seen:
            ready, _, _ = select.select([self.terminal], [], [], 60)
            assert ready, f"{text!r} was not seen, but {self.seen!r}"
            self.seen += os.read(self.terminal, 1024)
        self.seen = self.seen.split(text, 1)[1]

    def type(self, text):
        os.write(self.terminal, text)

    def code(self):
        _, status = os.waitpid(self.pid, 0)
        os.close(self.terminal)
        return os.waitstatus_to_exitcode(status)


READS = """
    import sys
    print("name?", flush=True)
    try:
        for line in iter(sys.stdin.readline, ""):
            print("hello", line.strip(), flush=True)
    except KeyboardInterrupt:
        print("interrupted once", flush=True)
        sys.exit(9)
"""


def test_a_command_reads_the_terminal_and_hears_its_keys(tmp_path):
    screen = Screen(words(tmp_path, "--", *python(READS)))
    screen.see(b"name?")
    screen.type(b"me\n")
    screen.see(b"hello me")
    screen.type(b"\x1a")  # There is no shell that could continue it: it goes on.
    screen.type(b"again\n")
    screen.see(b"hello again")
    screen.type(b"\x03")
    screen.see(b"interrupted once")
    assert screen.code() == 9


@pytest.mark.long
def test_a_shell_stops_and_continues_it_as_any_job(tmp_path):
    (tmp_path / "job").write_text(f"exec {shlex.join(words(tmp_path, '--', *python(READS)))}\n")
    screen = Screen(["bash", "--norc", "--noprofile", "-o", "pipefail", "-i"])
    screen.see(b"what next?")
    screen.type(f"sh {tmp_path / 'job'} | cat\n".encode())
    screen.see(b"name?")
    for name in (b"one", b"two"):
        screen.type(name + b"\n")
        screen.see(b"hello " + name)
        screen.type(b"\x1a")
        screen.see(b"Stopped")
        screen.see(b"what next?")
        screen.type(b"fg\n")
        eventually(lambda: os.tcgetpgrp(screen.terminal) != screen.pid)
    screen.type(b"three\n")
    screen.see(b"hello three")
    screen.type(b"\x03")
    screen.see(b"interrupted once")
    screen.see(b"what next?")
    screen.type(b"exit $?\n")
    assert screen.code() == 9
