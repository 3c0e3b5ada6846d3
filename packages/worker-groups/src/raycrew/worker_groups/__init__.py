"""Worker groups on Ray."""
