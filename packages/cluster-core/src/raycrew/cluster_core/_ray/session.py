"""Which connection to Ray something belongs to."""

from dataclasses import dataclass
from typing import Self

from raycrew.cluster_core._ray.compat import client_id, is_client, job_id
from raycrew.cluster_core.errors import ClusterClosedError


@dataclass(frozen=True, slots=True)
class Session:
    """This process's connection to Ray, as Ray itself names it.

    What talks to Ray keeps the session that it belongs to and checks it before each use: by itself Ray would
    connect again, perhaps to another cluster, and wait there for what only the first one has.

    Attributes:
        id: The cluster's session and the job in it, which a driver and its workers share; behind a `ray://`
            proxy the client's own id. Never the same again after a `ray.shutdown()`.
    """

    id: str

    @classmethod
    def current(cls) -> Self | None:
        """The session of this process, or None where it is not connected to Ray.

        Never connects and asks nobody, so it may be called often, and from any thread.
        """
        if is_client():
            return None if (found := client_id()) is None else cls(f"ray-client/{found}")
        return None if (found := job_id()) is None else cls(found)

    def check(self) -> None:
        """Make sure that this process is still connected to Ray by this session.

        Raises:
            ClusterClosedError: It is not, or by another session.
        """
        current = type(self).current()
        if current == self:
            return
        now = "this process is not connected to Ray" if current is None else f"now it is {current.id}"
        raise ClusterClosedError(
            f"the connection to Ray that this belongs to, {self.id}, has ended; {now}. What was made over it "
            "is gone: connect with init_ray() if need be, and make it anew"
        )
