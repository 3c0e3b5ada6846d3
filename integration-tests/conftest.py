pytest_plugins = ["raycrew.cluster_core.testing"]
