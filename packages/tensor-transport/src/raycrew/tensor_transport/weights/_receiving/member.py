"""A receiver as the directory knows it: hears of versions by number, votes, and says what it holds."""

import contextlib
import time

from raycrew.tensor_transport._ray import where
from raycrew.tensor_transport.errors import (
    DirectoryLostError,
    TransportError,
    TransportTimeoutError,
    UpdateAbortedError,
)
from raycrew.tensor_transport.protocols import ByteStore
from raycrew.tensor_transport.weights._directory import Record, Returns, WeightDirectory
from raycrew.tensor_transport.weights._receiving.feeds import DirectoryFeed, PlanMemory, UpdateFeed
from raycrew.tensor_transport.weights._receiving.fetching import Feed
from raycrew.tensor_transport.weights._update import WeightUpdate, release_scope


class Member:
    """One receiver's place in a directory, if there is one.

    Attributes:
        name: What the directory calls the receiver.
    """

    def __init__(self, directory: WeightDirectory | None, name: str) -> None:
        self.name = name
        self._directory = directory
        self._memory = PlanMemory()
        self._returns = None if directory is None else Returns(directory)

    @property
    def directory(self) -> WeightDirectory:
        """The directory.

        Raises:
            ValueError: There is none.
        """
        if self._directory is None:
            raise ValueError("versions are found by their number in a directory: WeightReceiver(directory=…)")
        return self._directory

    def arrive(self) -> None:
        """A receiver of this name is made: it holds nothing, whatever the one before it held."""
        if self._directory is not None:
            self._directory.ask(Record.arrive, self.name)

    def feed(self, update: WeightUpdate | int, *, reads: bool = True, is_patient: bool = False) -> Feed:
        """Where the buckets of an update are heard of; or whether it is given up, by who `reads` none.

        Who is patient hears of buckets when all of them are there.
        """
        if isinstance(update, WeightUpdate):
            return UpdateFeed(update)
        node = where() if reads else ""
        return DirectoryFeed(
            self.directory, update, self.name, node, self._memory, is_patient=reads and is_patient
        )

    def hear(self, version: int, deadline: float | None, store: ByteStore) -> None:
        """Vote for a version, and wait for what the directory decides, and for what nobody needs then.

        Raises:
            UpdateAbortedError: It was given up.
            DirectoryLostError: Nobody knows.
        """
        vote = (Record.vote, (version, self.name, True, ""))
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        told = (version, release_scope(store, ""), self.name)
        try:
            decision, freed = self.directory.say_and_wait(vote, Record.outcome, left, *told)
            if self._returns is not None:
                self._returns.keep(freed)
        except TransportTimeoutError:
            late = f"receiver {self.name} waited long enough"
            decision = "aborted" if self.directory.ask(Record.abort, version, late) else "committed"
        if decision != "committed":
            reason = self.directory.ask(Record.reason, version)
            raise UpdateAbortedError(f"version {version} was given up: {reason}")

    def refuse(self, update: WeightUpdate | int, error: BaseException) -> None:
        """Tell the others that this receiver does not have the version."""
        if isinstance(update, int) and self._directory is not None:
            with contextlib.suppress(TransportError):  # Why it is refused is raised.
                self._directory.ask(Record.vote, int(update), self.name, False, repr(error))

    def take_back(self, version: int, error: DirectoryLostError) -> None:
        """A directory that stood still may yet read that it was voted for what is given up by now."""
        with contextlib.suppress(DirectoryLostError):
            self.directory.tell(Record.vote, version, self.name, False, repr(error))

    def hold(self, version: int, store: ByteStore, *, is_known: bool) -> None:
        """Say what is held now, unless the vote did, and release what nobody needs any more."""
        if self._returns is not None:
            self._returns.give_back(store)
            if not is_known:
                with contextlib.suppress(DirectoryLostError):
                    self.directory.ask(Record.hold, self.name, version)
                    self._returns.collect(store, release_scope(store, ""), self.name)

    def leave(self) -> None:
        """The receiver is closed."""
        if self._directory is not None:
            with contextlib.suppress(DirectoryLostError):
                self._directory.ask(Record.leave, self.name)
