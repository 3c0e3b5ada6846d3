"""Engines of others that take weights: each is imported only where it runs."""
