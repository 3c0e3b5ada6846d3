"""Bundles: what is asked for, which node takes what, allocation, and who holds a slot on which bundle."""
