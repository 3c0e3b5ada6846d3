"""Waiting for each other: file locks, progress, and Ctrl-C."""
