"""What keeps keys and values beside an engine, and would have it compute with those of older weights."""

from collections.abc import Iterator

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from raycrew.tensor_transport.errors import WeightUpdateError


def check_connectors() -> None:
    """Refuse connectors that can't be told to drop what they have; vLLM takes those to have done so.

    Raises:
        WeightUpdateError: This worker has one.
    """
    for connector in _connectors():
        if type(connector).reset_cache is KVConnectorBase_V1.reset_cache:
            raise WeightUpdateError(
                f"the KV connector {type(connector).__name__} has no reset_cache, and may keep what older "
                "weights computed: use one that has it, as a subclass of this may (kv_connector_module_path)"
            )


def _connectors() -> Iterator[KVConnectorBase_V1]:
    """The worker's, and those that it consists of."""
    if has_kv_transfer_group():
        connector = get_kv_transfer_group()
        yield connector
        yield from getattr(connector, "sub_connectors", ())
