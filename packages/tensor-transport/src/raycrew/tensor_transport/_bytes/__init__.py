"""Tensors and objects as plain bytes in few buffers, and back, without needless copies."""
