"""Membership of a cluster: found or started, configured, authenticated, and what travels to workers."""
