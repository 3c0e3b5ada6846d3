"""A generator as an endpoint in the form of OpenAI's API.

A worker serves it from a thread of its process, so that tokens take no way through the driver
(`EndpointOptions`); a proxy gives all replicas one address (`following.one_endpoint`).
"""
