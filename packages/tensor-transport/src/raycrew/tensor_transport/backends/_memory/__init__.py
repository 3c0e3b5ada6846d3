"""Memory of one machine that processes share: arenas as files, mappings, and whose they are."""
