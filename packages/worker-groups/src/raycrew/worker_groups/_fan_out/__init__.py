"""Stateless work spread over the cluster: calls, their batches, the warm pool, and its processes.

What calls it imports `calling`. The processes that run items import theirs alone, and so are there sooner.
"""
