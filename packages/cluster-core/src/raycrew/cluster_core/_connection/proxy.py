"""Joining through a `ray://` proxy: whether it answers, and once more where its server did not come up."""

import importlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from raycrew.cluster_core._connection.addresses import split_address
from raycrew.cluster_core._connection.token import read_token
from raycrew.cluster_core.errors import ClusterAuthenticationError, ClusterUnreachableError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_METHOD = "/ray.rpc.RayletDriver/ClusterInfo"
LIMITS = "no streaming generators, about a third of the call rate, slow puts of large objects"
_TRIES, _PAUSE_S = 3, 1.0
# A proxy starts a server for each process that joins. On a busy head node that ends before it serves, or
# takes longer than the 30 s that the proxy waits, or has ended just when the proxy reads its command line;
# the next one comes up.
NO_SERVER = (
    "Starting Ray client server failed",
    "Proxy failed to Connect to backend",
    "psutil_proc.cmdline()",
)


def check_proxy_answers(address: str, timeout_s: float, environ: Mapping[str, str]) -> None:
    """Ask a proxy anything; whatever it answers, except a refusal of the token, will do.

    Ray's client itself tries for half a minute and says only "timeout".

    Raises:
        ValueError: Ray's client is not installed.
        ClusterUnreachableError: What listens there is no proxy.
        ClusterAuthenticationError: The proxy refuses the token.
    """
    try:
        grpc: Any = importlib.import_module("grpc")
    except ModuleNotFoundError as error:
        raise ValueError(f"{address} needs Ray's client: install 'raycrew-cluster-core[client]'") from error
    if environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return  # The certificates are Ray's to find.
    host, port = split_address(address)
    token = read_token(environ)
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(f"[{host}]:{port}" if ":" in host else f"{host}:{port}") as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout_s)
            channel.unary_unary(_METHOD)(b"", timeout=timeout_s, metadata=metadata)
        except grpc.FutureTimeoutError as error:
            raise ClusterUnreachableError(
                f"what listens at {address} does not answer as a ray:// proxy does", address
            ) from error
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise ClusterAuthenticationError(
                    f"the proxy at {address} refuses this process's token. Before Python starts, "
                    "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN to its own",
                    address,
                ) from error


def with_tries(join: Callable[[], T], address: str) -> T:
    """Join, and once more where the proxy's server for this process did not come up.

    Raises:
        ConnectionError: It failed in another way, or so the third time.
    """
    for number in range(1, _TRIES):
        try:
            return join()
        except ConnectionError as error:
            if not any(words in str(error) for words in NO_SERVER):
                raise
            logger.warning("try %d of %d to join through %s failed: %s", number, _TRIES, address, error)
            time.sleep(_PAUSE_S)
    return join()
