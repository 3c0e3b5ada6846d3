"""What a publisher of deltas holds beside its weights: one copy of them, and what changed."""

import torch

from raycrew.tensor_transport import DeltaSource, WeightPublisher
from raycrew.tensor_transport.testing._transports import bounded_memory
from raycrew.tensor_transport.transports import SharedMemoryTransport

MIB = 1 << 20
BUCKET = 4 * MIB
MODEL = 64 * MIB
OTHER = 16 * MIB
"""What the process may take meanwhile for anything else."""


def test_a_publisher_of_deltas_holds_one_copy_and_two_buckets():
    model = {f"layer.{i}": torch.full((MIB,), float(i)) for i in range(MODEL // (4 * MIB))}
    source = DeltaSource()
    with SharedMemoryTransport() as store, WeightPublisher(store, bucket_bytes=BUCKET) as publisher:

        def publish(*, full):
            update = source.encode(model, full=full)
            publisher.publish(update.tensors, partial=update.partial)
            source.commit()
            return update

        with bounded_memory(MODEL + 2 * BUCKET + OTHER, "the first update, of which a copy is kept"):
            publish(full=True)
        for tensor in model.values():
            tensor[::100] += 1
        with bounded_memory(2 * BUCKET + OTHER, "an update of one value in a hundred"):
            assert publish(full=False).size_bytes < MODEL // 10
        for tensor in model.values():
            tensor += 1
        with bounded_memory(2 * BUCKET + OTHER, "an update of all values, told in full"):
            assert not publish(full=True).partial
