"""Batches, tensor handles and weight updates."""
