"""Every question to Ray: what it has and who holds it, calls on nodes, differences of versions."""
