"""Tensors over HTTP: the application, its server and client, and the format on the wire."""
