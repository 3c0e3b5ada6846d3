"""The only place that runs uv, and what uv is told: indexes and command lines."""
