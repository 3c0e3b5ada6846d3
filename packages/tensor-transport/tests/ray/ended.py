"""A script: what uses of Ray do after the connection that they belong to has ended; JSON on its last line.

`python ended.py ADDRESS [again]`, with RAY_ADDRESS set to where Ray would connect by itself; `again` connects
once more, so that there is another connection to look at.
"""

import json
import sys

import numpy as np
import ray
import torch

from raycrew.tensor_transport import NodeMemoryBackend, ObjectStoreBackend, RayRefBackend, ShardRead, _ray
from raycrew.tensor_transport.transports import ObjectStoreTransport
from raycrew.tensor_transport.weights import WeightDirectory

TENSORS = [torch.ones(300_000), torch.ones(3)]


def main(address, again=""):
    connect(address)
    stores, refs, lender = ObjectStoreBackend.start(), RayRefBackend(), NodeMemoryBackend()
    objects, transport, directory = _ray.RayByteStore(), ObjectStoreTransport(), WeightDirectory.start()
    of_stores, of_refs = stores.put(TENSORS), refs.put(TENSORS)
    lender.put(TENSORS)
    ticket, offer = objects.put(np.ones(8, np.uint8)), transport.offer(torch.ones(8))
    into = torch.empty(offer.size_bytes, dtype=torch.uint8)
    uses = {
        "refs.fetch": lambda: refs.fetch([ShardRead(shard) for shard in of_refs], timeout_s=30),
        "stores.put": lambda: stores.put(TENSORS),
        "stores.fetch": lambda: stores.fetch([ShardRead(shard) for shard in of_stores], timeout_s=30),
        "stores.release": lambda: stores.release(of_stores),
        "stores.stats": stores.stats,
        "bytes.get": lambda: objects.get(ticket, 30),
        "transport.pull": lambda: transport.pull([offer.whole], [into], timeout_s=30).wait(),
        "transport.map": lambda: transport.map(offer, timeout_s=30),
        "directory.ask": lambda: directory.latest,
        "directory.wait": lambda: directory.wait(of_nothing, 1),
        "stores.close": stores.close,
        "directory.close": directory.close,
    }
    of_any = {
        "refs.put": lambda: refs.put(TENSORS),
        "lender.put": lambda: lender.put(TENSORS),
        "lender.put nothing": lambda: lender.put([]),
        "bytes.put": lambda: objects.put(np.ones(8, np.uint8)),
        "transport.offer": lambda: transport.offer(torch.ones(8)),
        "directory.start": WeightDirectory.start,
        "directory.find": lambda: WeightDirectory.find("nobody"),
        "stores.start": ObjectStoreBackend.start,
        "current node": _ray.current_node_id,
    }
    ray.shutdown()
    if again:
        connect(address)
    found = {name: outcome(use, again) for name, use in (uses | ({} if again else of_any)).items()}
    if not again:
        found["the user"] = outcome(lambda: ray.put(1), again)
    elif not all(lender.put(TENSORS)):
        raise SystemExit(1)
    ray.shutdown()
    sys.stdout.write(json.dumps(found) + "\n")


def of_nothing():
    return None


def connect(address):
    ray.init(address=address, log_to_driver=False, logging_level="WARNING")


def outcome(use, again):
    """Name and text of the error, and whether Ray connected by itself."""
    try:
        use()
    except Exception as error:  # noqa: BLE001 - it is looked at by the test
        name, text = type(error).__name__, str(error)
    else:
        name, text = "", ""
    joined = not again and ray.is_initialized()
    if joined:
        ray.shutdown()
    return name, text, joined


if __name__ == "__main__":
    main(*sys.argv[1:])
