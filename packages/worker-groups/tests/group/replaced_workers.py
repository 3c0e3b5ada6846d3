"""Workers of groups in which somebody stands by."""

import os
import sys

from raycrew.worker_groups import current_worker

#: What was there when this class was imported.
AT_IMPORT = {name: os.environ.get(name) for name in ("RANK", "TOKEN", "COLOUR")}


class Replaced:
    """Notes what it hears, and says what it and its process have found."""

    def __init__(self, start=0, fate=None):
        self.heard, self.total = [], start
        if fate is not None and fate.exists():  # of the first one alone
            signal_number = int(fate.read_text())
            fate.unlink()
            os.kill(os.getpid(), signal_number)

    def on_generation(self, worker):
        self.heard.append((worker.generation, worker.master_port, int(os.environ["MASTER_PORT"])))

    def get_heard(self):
        return self.heard

    def add(self, amount):
        self.total += amount
        return self.total

    def pid(self):
        return os.getpid()

    def where(self):
        return current_worker()

    def at_import(self):
        return AT_IMPORT

    def now(self, *names):
        return {name: os.environ.get(name) for name in names}

    def found_before(self):
        """What the module that was imported ahead has found; None where it was not imported."""
        module = sys.modules.get("standing_by")
        return None if module is None else module.FOUND

    def die_on(self, ranks):
        if current_worker().rank in ranks:
            os._exit(7)
