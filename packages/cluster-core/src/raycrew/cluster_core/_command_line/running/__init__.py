"""`raycrew run`: a command beside a cluster that is found or started, with its signals and its exit code."""

from raycrew.cluster_core._command_line.running.run import run

__all__ = ["run"]
