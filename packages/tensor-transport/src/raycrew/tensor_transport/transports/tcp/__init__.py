"""Bytes over TCP: what offers and pulls them, the listener, and the bytes that both speak."""

from raycrew.tensor_transport.transports.tcp.transport import TcpTransport

__all__ = ["TcpTransport"]
