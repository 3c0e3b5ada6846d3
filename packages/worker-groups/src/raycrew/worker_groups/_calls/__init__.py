"""Calls of a group: who gets what, sent and awaited, and failures that say where."""
