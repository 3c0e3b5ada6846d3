"""Workers of groups that get fewer or more of them."""

import asyncio
import os
import time
from pathlib import Path

from workers import await_file

from raycrew.worker_groups import current_worker


class Generator:
    """Notes what becomes of it in a folder, where files say what is to become of it."""

    def __init__(self, folder):
        self.folder, self.heard, rank = Path(folder), [], current_worker().rank
        (self.folder / f"pid-{os.getpid()}").touch()
        if (self.folder / f"fails-on-{rank}").exists():
            raise ValueError(f"there is no rank {rank}")
        if (self.folder / f"waits-on-{rank}").exists():
            await_file(self.folder / "never")
        while (self.folder / f"holds-{rank}").exists():
            time.sleep(0.01)

    def on_generation(self, worker):
        self.heard.append((worker.generation, worker.world_size))

    def get_heard(self):
        return self.heard

    def where(self):
        return current_worker(), os.environ["MASTER_PORT"], os.environ.get("TOKEN")

    def rank(self):
        return current_worker().rank

    def pid(self):
        return os.getpid()

    def wait_for(self, path):
        await_file(path)
        return current_worker().rank

    def note(self, item):
        with (self.folder / f"noted-{os.getpid()}").open("a") as file:
            file.write(f"{item}\n")
        return item

    def note_or_die(self, item):
        dies = self.folder / f"dies-{current_worker().rank}"
        if dies.exists():
            dies.unlink()
            os._exit(1)
        return self.note(item)

    def leave(self):
        (self.folder / f"left-{current_worker().rank}").touch()

    def die_on(self, ranks):
        if current_worker().rank in ranks:
            os._exit(1)


class AsyncGenerator:
    async def rank(self):
        return current_worker().rank

    async def wait_for(self, path):
        while not Path(path).exists():
            await asyncio.sleep(0.01)
        return current_worker().rank
