"""A script: what becomes of threads that wait for objects as the connection ends; JSON is on the last line.

`python waiting.py ADDRESS [again]`, with RAY_ADDRESS set to where Ray would connect by itself; `again`
connects once more at once. (Ray itself may end the process by a segmentation fault where a `ray.get` of the
user, without a deadline, still waits in another thread: this package's threads never do so.)
"""

import dataclasses
import json
import sys
import threading
import time

import ray
import torch

from raycrew.tensor_transport import RayRefBackend, ShardRead
from raycrew.tensor_transport.transports import ObjectStoreTransport


def main(address, again=""):
    connect(address)
    never = ray.remote(num_cpus=0)(sleep).remote()
    transport, found = ObjectStoreTransport(), {}
    offer = dataclasses.replace(transport.offer(torch.ones(8)), key=never)
    transfer = transport.pull([offer.whole], [torch.empty(offer.size_bytes, dtype=torch.uint8)])
    shard = dataclasses.replace(RayRefBackend().put([torch.ones(8)])[0], locator=(never, 0))
    fetching = threading.Thread(target=note, args=(found, "refs.fetch", lambda: fetch(shard)))
    fetching.start()
    until_they_wait(2)
    ray.shutdown()
    if again:
        connect(address)
    note(found, "transport.pull", lambda: transfer.wait(60))
    fetching.join(60)
    transport.close()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith(("pull-", "raycrew-"))]
    joined = not again and ray.is_initialized()
    sys.stdout.write(json.dumps([found, left, joined]) + "\n")


def sleep():
    threading.Event().wait()


def connect(address):
    ray.init(address=address, log_to_driver=False, logging_level="WARNING")


def note(found, name, use):
    try:
        use()
    except BaseException as error:  # noqa: BLE001 - it is looked at by the test
        found[name] = [type(error).__name__, str(error)]
    else:
        found[name] = ["", ""]


def fetch(shard):
    """Without a deadline."""
    RayRefBackend().fetch([ShardRead(shard)])


def until_they_wait(count):
    """That many threads wait for objects."""
    deadline = time.monotonic() + 60
    while sum(map(waits, sys._current_frames().values())) < count:
        if time.monotonic() > deadline:
            raise SystemExit("they do not wait")
        time.sleep(0.01)


def waits(frame):
    while frame is not None:
        if (
            frame.f_code.co_name in ("get", "not_here")
            and "tensor_transport/_ray" in frame.f_code.co_filename
        ):
            return True
        frame = frame.f_back
    return False


if __name__ == "__main__":
    main(*sys.argv[1:])
