"""The main example, made importable, as a process of its own, and drivers that run it with other workers."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

EXAMPLE = Path(__file__).parent.parent / "examples" / "grpo"
LIBRARY = EXAMPLE.with_name("generation")
sys.path[:0] = [str(EXAMPLE), str(LIBRARY)]
MODULES = os.pathsep.join(
    map(str, (EXAMPLE, LIBRARY, Path(__file__).parent, os.environ.get("PYTHONPATH", "")))
)


def heed_interrupts():
    """A process started in a shell's background ignores them, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Run:
    """The example in a process of its own, and whatever that leaves behind."""

    def __init__(self, *arguments, script=EXAMPLE / "run.py", env=None):
        self.mark = uuid.uuid4().hex
        environment = {**os.environ, **(env or {}), "GRPO_TEST_MARK": self.mark, "COLUMNS": "200"}
        command = [sys.executable, str(script), *map(str, arguments)]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=heed_interrupts,
        )  # fmt: skip

    def finish(self, timeout_s=280):
        """(exit code, standard output, standard error), and no process may be left."""
        out, err = self.process.communicate(timeout=timeout_s)
        assert not self.left_behind(), out + err
        return self.process.returncode, out, err

    def wait_for(self, file):
        """Until the run has made a file."""
        deadline = time.monotonic() + 120
        while not file.exists():
            assert self.process.poll() is None, self.finish()
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def left_behind(self, patience_s=20.0):
        """Command lines of processes that still carry this run's mark; Ray's own take a moment to end."""
        deadline = time.monotonic() + patience_s
        while (found := self._marked()) and time.monotonic() < deadline:
            psutil.wait_procs(found, timeout=1)
        return [" ".join(process.cmdline()) for process in found]

    def _marked(self):
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("GRPO_TEST_MARK") == self.mark:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found


def assert_one_clear_error(run, *words):
    code, out, err = run.finish()
    lines = [line for line in err.splitlines() if line.startswith("error:")]
    assert code == 1, out + err
    assert len(lines) == 1, err
    assert "Traceback" not in err
    for word in words:
        assert word in lines[0], err


def tiny_driver(folder):
    """The example's own main with a model that needs torch alone; its third update may stall."""
    (folder / "stalling.py").write_text(
        "import os, pathlib, time\n"
        "from grpo_tiny import TinyEngine, TinyGenerator\n"
        "class Engine(TinyEngine):\n"
        "    loaded = 0\n"
        "    def load_weights(self, weights):\n"
        "        self.loaded += 1\n"
        "        if self.loaded == 3 and (stall := os.environ.get('STALL')):\n"
        "            pathlib.Path(stall).touch()\n"
        "            go, deadline = pathlib.Path(stall).with_name('go'), time.monotonic() + 60\n"
        "            while not go.exists() and time.monotonic() < deadline:\n"
        "                time.sleep(0.05)\n"
        "        super().load_weights(weights)\n"
        "class Generator(TinyGenerator):\n"
        "    def create_engine(self, seed):\n"
        "        return Engine(self.options.model)\n"
    )
    script = folder / "tiny_run.py"
    script.write_text(
        "import sys\n"
        "import grpo.main\n"
        "from grpo.workers import WorkerKind\n"
        "generator = WorkerKind('tiny', 'stalling.Generator', None)\n"
        "grpo.main.choose_generator = lambda *_: generator\n"
        "sys.exit(grpo.main.main(policy=WorkerKind('policy', 'grpo_tiny.TinyPolicy', None)))\n"
    )
    return script


def driver(folder):
    """The example's own main with another policy worker, which lives beside the driver script."""
    (folder / "other_policy.py").write_text(
        "import os, pathlib, time\n"
        "class Policy:\n"
        "    def __init__(self, config, directory):\n"
        "        if not (stall := os.environ.get('STALL')):\n"
        "            raise RuntimeError('no such checkpoint')\n"
        "        pathlib.Path(stall).touch()\n"
        "        time.sleep(600)\n"
        "    def warm_up(self):\n"
        "        pass\n"
        "    train = state = restore = done = warm_up\n"
        "class Generator:\n"
        "    def __init__(self, **_):\n"
        "        pass\n"
        "    def generate(self):\n"
        "        pass\n"
        "    check = endpoint = sleep = wake = generate\n"
    )
    script = folder / "other_run.py"
    script.write_text(
        "import sys\n"
        "import grpo.main\n"
        "from grpo.workers import WorkerKind\n"
        "generator = WorkerKind('idle', 'other_policy.Generator', None)\n"
        "grpo.main.choose_generator = lambda *_: generator\n"
        "sys.exit(grpo.main.main(policy=WorkerKind('policy', 'other_policy.Policy', None)))\n"
    )
    return script
