"""Ways to keep tensors, one module each."""
