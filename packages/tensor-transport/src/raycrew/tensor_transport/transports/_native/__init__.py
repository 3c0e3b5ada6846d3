"""Calls to the kernel and to the CUDA driver, as modules of few functions each."""

from raycrew.tensor_transport.transports._native import cuda_driver, marks, readv

__all__ = ["cuda_driver", "marks", "readv"]
