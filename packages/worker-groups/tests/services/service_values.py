"""Options of services as tests give them."""

from raycrew.worker_groups.services._options import ServiceOptions

GIVEN = {
    "server": "package.app:create",
    "ports": 1,
    "replicas": 1,
    "ready": "/health",
    "ready_is_open": False,
    "name": "",
    "token_variable": None,
    "host": None,
    "cwd": None,
    "environment": "",
    "max_restarts": 3,
    "ready_timeout_s": 600.0,
    "probe_interval_s": 1.0,
    "silent_s": 30.0,
    "grace_s": 10.0,
    "max_connections": 1024,
}
TOKEN = "a-token-that-nobody-knows"


def options(**changed):
    return ServiceOptions.among({**GIVEN, **changed, "cluster": None})
