"""Workers that others call, and who calls them from actors of their own."""

import os
import tempfile
from pathlib import Path

from workers import await_file

from raycrew.worker_groups import WorkerFailureError, WorkerGroupClosedError, current_worker, sharded


class Rollout:
    def __init__(self, note="", *, scale=1):
        self.scale = scale

    def pid(self):
        return os.getpid()

    def token(self):
        return os.environ.get("API_TOKEN")

    def scaled(self, prompt):
        return prompt * self.scale

    @sharded("dp", collect="concat")
    def doubled(self, rows):
        return [2 * row for row in rows]

    def tokens(self, n):
        for i in range(n):
            yield current_worker().rank, i

    async def later(self, value):
        return value

    def fail(self):
        raise ValueError("as it was told to")

    def run(self, folder, dies=None):
        """Leaves a mark of each time that it runs, and may end its process."""
        descriptor, _ = tempfile.mkstemp(dir=folder)
        os.close(descriptor)
        if current_worker().rank == dies:
            os._exit(7)
        return current_worker().generation

    def mark(self, folder, token, gate=""):
        """Leaves a mark of the token, and another one should it run twice."""
        mark = Path(folder, f"{token}-{current_worker().rank}")
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            Path(folder, f"twice-{mark.name}").touch()
        if gate:
            await_file(gate)
        return token, current_worker().rank

    def once(self, item):
        """Ends its process unless there is a mark; gives the item and its generation."""
        folder, number = item
        marker = Path(folder, "died")
        if number == 1 and not marker.exists():
            marker.touch()
            os._exit(7)
        return number, current_worker().generation


class Meeting:
    """Has to hear of a generation before it is called in it."""

    def __init__(self):
        self.heard = None

    def on_generation(self, worker):
        self.heard = worker.generation

    def seen(self):
        return current_worker().generation, self.heard

    def wait_for(self, path):
        await_file(path)

    def end(self):
        os._exit(7)


class Caller:
    """An actor that has a handle."""

    def __init__(self, handle):
        self.handle = handle

    def results(self, method, *args):
        return self.handle.call(method, *args).get_results(timeout=60)

    def use(self):
        handle = self.handle
        return {
            "pids": handle.call(Rollout.pid).get_results(timeout=60),
            "secret": handle.call("token").get_results(timeout=60),
            "declared": handle.call(Rollout.doubled, [1, 2, 3, 4]).get_results(timeout=60),
            "stream": sorted(handle.stream(Rollout.tokens, 2)),
            "one": handle.on([1]).call(Rollout.scaled, 4).get_results(timeout=60),
            "named": handle.run_all_workers_multiple_data("scaled", [1, 2]).get_results(timeout=60),
            "balanced": list(handle.balancer.map("scaled", [1, 2, 3])),
            "facts": (handle.ranks, handle.world_size, handle.generation, handle.tied_workers_groups),
            "text": repr(handle),
        }

    async def wait(self, value):
        return await self.handle.call("scaled", value)

    def failure(self, method, *args):
        try:
            self.results(method, *args)
        except WorkerFailureError as error:
            return error.rank, error.group_name, error.message, getattr(error, "__notes__", [])
        return None

    def is_closed(self):
        try:
            self.results("pid")
        except WorkerGroupClosedError as error:
            return str(error)
        except WorkerFailureError:
            pass
        return ""

    def items(self, folder, n):
        return list(self.handle.balancer.map("once", [(folder, number) for number in range(n)]))

    def refresh(self):
        return self.handle.refresh()
