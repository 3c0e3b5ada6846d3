"""The store: one folder per key, published by a stamp; resolving, upkeep."""
