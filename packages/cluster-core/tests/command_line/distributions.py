"""Distributions that are found as if they were installed."""


def add_distribution(folder, name, code, entry_points):
    """A module of that name in a folder, and what an installation says of it."""
    (folder / f"{name}.py").write_text(code)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
