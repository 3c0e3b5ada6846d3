"""Workers of the tests of diagnoses; workers import this module by name."""

import os
import sys

from workers import Worker, await_file

from raycrew.worker_groups import current_worker


class Talker(Worker):
    """Says things, secrets among them."""

    def say(self, count):
        for number in range(count):
            sys.stdout.write(f"line {number}\n")
        sys.stderr.write(f"the token is {os.environ['API_TOKEN']}\n")
        sys.stdout.flush()
        sys.stderr.flush()


class Starter:
    """Rank 1 does not start; the others wait for what does not come."""

    def __init__(self, gate):
        if current_worker().rank == 1:
            raise ValueError("rank 1 can't start")
        await_file(gate)
