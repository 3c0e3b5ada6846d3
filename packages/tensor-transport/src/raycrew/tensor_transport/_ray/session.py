"""Which connection to Ray something belongs to."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Self

from raycrew.tensor_transport._ray.compat import (
    auto_connect,
    await_shutdown,
    connection_name,
    ray_module,
)
from raycrew.tensor_transport.errors import TransportClosedError

_ENDING_S = 10.0


@dataclass(frozen=True, slots=True)
class Session:
    """This process's connection to Ray, as Ray itself names it.

    What belongs to a connection keeps its session and uses Ray over that: by itself Ray would connect again,
    perhaps to another cluster, and wait there for what only the first one has.

    Attributes:
        id: The cluster's session and the job in it, which a driver and its workers share; behind a `ray://`
            proxy the client's own id. Never the same again after a `ray.shutdown()`.
    """

    id: str

    @classmethod
    def current(cls) -> Self | None:
        """The session of this process, or None where it is not connected to Ray; asks nobody."""
        return None if (found := connection_name()) is None else cls(found)

    def check(self) -> None:
        """Make sure that this process is still connected to Ray by this session.

        Where another thread is ending it, this raises once that is over.

        Raises:
            TransportClosedError: It is not, or by another session.
        """
        if connection_name() == self.id:
            return
        ray_module()  # Says so in a forked child.
        await_shutdown(_ENDING_S)
        current = connection_name()
        now = "this process is not connected to Ray" if current is None else f"now it is {current}"
        raise TransportClosedError(
            f"the connection to Ray that this belongs to, {self.id}, has ended; {now}. What was put over it, "
            "and actors that were started, are gone: connect with ray.init() if need be, and make them anew"
        )

    def while_connected(self) -> AbstractContextManager[None]:
        """What is asked of Ray in here goes over this session, and never makes Ray connect by itself.

        What fails because it has ended raises a `TransportClosedError`, whatever Ray says.

        Raises:
            TransportClosedError: The session had ended before, or has meanwhile.
        """
        return _Connected(self)


class _Connected:
    """What `while_connected` gives; a generator would cost twice as much, in each put and get."""

    __slots__ = ("_session", "_switch")

    def __init__(self, session: Session) -> None:
        self._session = session

    def __enter__(self) -> None:
        self._session.check()
        self._switch = auto_connect()
        self._switch.refusals += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._switch.refusals -= 1
        if isinstance(error, SystemExit):  # So Ray ends what waits, when its connection is about to end.
            await_shutdown(_ENDING_S)
        if isinstance(error, Exception | SystemExit):
            self._session.check()


def current_session() -> Session:
    """The session of this process.

    Raises:
        TransportClosedError: It is not connected to Ray, which would connect by itself to whatever it finds.
        TransportError: Ray is not installed, or was in use when this process was forked.
    """
    ray_module()
    if (session := Session.current()) is None:
        raise TransportClosedError(
            "this process is not connected to Ray, or not any more: connect with ray.init(). What was "
            "put over an earlier connection is gone with it"
        )
    return session
