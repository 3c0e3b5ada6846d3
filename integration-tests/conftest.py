import os

os.environ["UV_COMPILE_BYTECODE"] = (
    "0"  # of environments that a few processes import, for this process and for Ray's
)

pytest_plugins = ["raycrew.cluster_core.testing"]
