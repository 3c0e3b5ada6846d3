"""Workers that have something that only one group may have at a time."""

import os
import threading
from pathlib import Path


class Device:
    """A device that is for one: who has it, who took it beside somebody else, and which steps are to fail."""

    def __init__(self):
        self.lock, self.on_it, self.crowds, self.steps = threading.Lock(), set(), [], []
        self.failures = {}

    def step(self, name, what):
        fails = self.failures.pop((name, what), None)
        if fails == "before":
            raise RuntimeError(f"{what} of {name} failed at once")
        with self.lock:
            self.steps.append((name, what))
            (self.on_it.add if what == "wake" else self.on_it.discard)(name)
            if len(self.on_it) > 1:
                self.crowds.append(set(self.on_it))
        if fails == "after":
            raise RuntimeError(f"{what} of {name} failed in the end")


DEVICES = {}


class OnDevice:
    """Wakes on the device of a key, and is awake when it is made."""

    def __init__(self, key, name):
        self.device, self.name, self.gate = DEVICES[key], name, threading.Event()
        self.device.step(name, "wake")

    def sleep(self):
        self.device.step(self.name, "sleep")

    def wake(self):
        self.device.step(self.name, "wake")

    def wake_late(self):
        self.gate.wait(30)
        self.wake()

    def needs(self, something):
        return something


class Hoarder:
    """Has memory while it is awake, and may be told to die in its next step."""

    def __init__(self, size_bytes, folder, asleep=False):
        self.size_bytes, self.folder, self.memory = size_bytes, Path(folder), b""
        self.asleep_at_first = asleep
        if not asleep:
            self.wake()

    def die_in(self, what):
        (self.folder / what).touch()

    def sleep(self):
        self._may_die("sleep")
        self.memory = b""

    def wake(self):
        self._may_die("wake")
        if not self.memory:
            self.memory = b"x" * self.size_bytes

    def _may_die(self, what):
        if (self.folder / what).exists():
            (self.folder / what).unlink()
            os._exit(1)

    def state(self):
        return len(self.memory), self.asleep_at_first

    def pid(self):
        return os.getpid()
