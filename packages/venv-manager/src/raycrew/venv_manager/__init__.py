"""A virtual environment per kind of worker."""
