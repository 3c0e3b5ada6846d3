"""Workers that don't end when they are asked to, and that leave processes behind; imported by name."""

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from raycrew.worker_groups._on_nodes.marks import VARIABLE

_SLEEP = [sys.executable, "-c", "import time; time.sleep(3600)"]


class Sleepy:
    def __del__(self):
        time.sleep(3600)


class Unwilling:
    def pid(self):
        return os.getpid()

    def adopts_orphans(self):
        adopts = ctypes.c_int(-1)
        ctypes.CDLL(None, use_errno=True).prctl(37, ctypes.byref(adopts))  # PR_GET_CHILD_SUBREAPER
        return adopts.value

    def hang_at_exit(self):
        atexit.register(time.sleep, 3600)

    def hang_in_del(self):
        self.sleepy = Sleepy()

    def hang_in_thread(self):
        threading.Thread(target=time.sleep, args=(3600,)).start()

    def stop(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def start_child(self):
        return subprocess.Popen(_SLEEP).pid

    def start_session(self):
        return subprocess.Popen(_SLEEP, start_new_session=True).pid

    def start_daemon(self, folder, *, execute):
        """Forked twice, in a session of its own, its parents gone, its descriptors closed."""
        file = Path(folder, f"{os.getpid()}-{execute}")
        pid = os.fork()
        if pid == 0:
            os.setsid()
            if os.fork() == 0:
                file.with_suffix(".new").write_text(str(os.getpid()))
                file.with_suffix(".new").rename(file)
                os.closerange(0, 4096)
                if execute:
                    os.execv(sys.executable, _SLEEP)
                time.sleep(3600)
            os._exit(0)
        os.waitpid(pid, 0)
        while not file.exists():
            time.sleep(0.01)
        return int(file.read_text())

    def forget_mark(self):
        os.environ.pop(VARIABLE, None)


class LeavesAndRaises(Unwilling):
    def __init__(self, folder):
        daemon = self.start_daemon(folder, execute=True)
        Path(folder, f"daemon-{daemon}").touch()
        Path(folder, f"worker-{os.getpid()}").touch()
        atexit.register(time.sleep, 3600)
        raise RuntimeError("not today")


class Moody(Unwilling):
    def __init__(self, folder):
        if Path(folder, "bad").exists():
            raise RuntimeError("not today")
