"""Programs to verify: right ones, wrong ones, and those that misbehave."""

import random

from sandbox import Case, Submission

MEDIAN = (
    Case("median([3, 1, 2])", 2),
    Case("median([4, 1, 3, 2])", 2.5),
    Case("median([7])", 7),
)

PROGRAMS = {
    "right": """
def median(values):
    values = sorted(values)
    half = len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2
""",
    "wrong for even lengths": """
def median(values):
    return sorted(values)[len(values) // 2]
""",
    "raises": """
def median(values):
    return values[len(values)]
""",
    "does not compile": "def median(values) return values",
    "loops for ever": """
def median(values):
    while True:
        pass
""",
    "sleeps for ever": """
import time
def median(values):
    time.sleep(1000)
""",
    "takes all memory": """
def median(values):
    return len(bytearray(1 << 40))
""",
    "fills the disk": """
def median(values):
    with open("data", "wb") as file:
        while True:
            file.write(bytes(1 << 20))
""",
    "exits with success": """
import os
os._exit(0)
""",
    "is equal to everything": """
class Median:
    def __eq__(self, other):
        return True
    def __repr__(self):
        return "Median()"
def median(values):
    return Median()
""",
    "leaves processes behind": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
def median(values):
    return 2
""",
    "reads secrets": """
import os
def median(values):
    return os.environ["API_TOKEN"]
""",
}


def make(count: int, seed: int = 0) -> list[Submission]:
    """`count` submissions, half of them right; the last one has no tests."""
    rng = random.Random(seed)
    others = [name for name in PROGRAMS if name != "right"]
    names = ["right" if i % 2 else others[i // 2 % len(others)] for i in range(count - 1)]
    rng.shuffle(names)
    return [
        *(Submission(name, PROGRAMS[name], MEDIAN) for name in names),
        Submission("has no tests", PROGRAMS["right"], ()),
    ]
