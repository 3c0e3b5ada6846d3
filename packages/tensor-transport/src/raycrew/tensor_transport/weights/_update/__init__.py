"""What an update is: tensors in buckets with checksums, regions of them, and where their bytes lie."""

from raycrew.tensor_transport.weights._update.checksums import checksum, digest_weights
from raycrew.tensor_transport.weights._update.devices import CPU, fresh_bucket, settle, use_here
from raycrew.tensor_transport.weights._update.manifest import (
    Bucket,
    BucketPlan,
    Schema,
    TensorEntry,
    WeightUpdate,
    check_digest,
    compare_schemas,
    dtype_name,
    join_updates,
    joined_name,
    schema_of,
    sealed,
)
from raycrew.tensor_transport.weights._update.overlaps import Image, Overlap, overlaps_of
from raycrew.tensor_transport.weights._update.regions import Region, check_cover, region_of
from raycrew.tensor_transport.weights._update.spans import Span, Stopwatch
from raycrew.tensor_transport.weights._update.stores import (
    BroadcastStore,
    abandon,
    as_store,
    bucket_bytes_for,
    device_of,
    get_tensor,
    put_tensor,
    release_scope,
    reserve,
    shares_memory,
)
from raycrew.tensor_transport.weights._update.twins import order_of, twins_of

__all__ = [
    "CPU",
    "BroadcastStore",
    "Bucket",
    "BucketPlan",
    "Image",
    "Overlap",
    "Region",
    "Schema",
    "Span",
    "Stopwatch",
    "TensorEntry",
    "WeightUpdate",
    "abandon",
    "as_store",
    "bucket_bytes_for",
    "check_cover",
    "check_digest",
    "checksum",
    "compare_schemas",
    "device_of",
    "digest_weights",
    "dtype_name",
    "fresh_bucket",
    "get_tensor",
    "join_updates",
    "joined_name",
    "order_of",
    "overlaps_of",
    "put_tensor",
    "region_of",
    "release_scope",
    "reserve",
    "schema_of",
    "sealed",
    "settle",
    "shares_memory",
    "twins_of",
    "use_here",
]
