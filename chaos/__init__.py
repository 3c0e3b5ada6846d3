"""The chaos suite: `python -m chaos.run`."""
