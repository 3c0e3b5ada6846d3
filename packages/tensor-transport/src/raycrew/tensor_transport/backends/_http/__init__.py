"""Tensors over HTTP: the application, its server and client, and the format on the wire."""

from raycrew.tensor_transport.backends._http.app import ShardStore, shard_app
from raycrew.tensor_transport.backends._http.client import HttpClient, MakeContext, Origin
from raycrew.tensor_transport.backends._http.server import ShardServer

__all__ = ["HttpClient", "MakeContext", "Origin", "ShardServer", "ShardStore", "shard_app"]
