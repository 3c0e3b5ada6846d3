"""Devices: which one a process holds and how it addresses it, and getting particular ones from Ray."""
