"""Joining a generation: arrive, wait for all, and connect."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from raycrew.tensor_transport.errors import GroupError, GroupTimeoutError, TransportError
from raycrew.tensor_transport.process_groups._broadcasting import (
    CollectiveGroup,
    Fabric,
    Party,
    device_for,
    fabric_for,
)
from raycrew.tensor_transport.process_groups._membership import (
    GROUP_KEYS,
    Board,
    Cause,
    Invitation,
    Lifeline,
    Seat,
    Watch,
    choose_backend,
    group_error,
)
from raycrew.tensor_transport.process_groups._process import Deadline, Gate, address_towards
from raycrew.tensor_transport.transports import Choice, member_facts

T = TypeVar("T")
_TICK_S = 0.25
_GRACE_S = 2.0


def join_group(invitation: Invitation, *, timeout_s: float = 60.0) -> CollectiveGroup:
    """Join one generation of a group as the member that was invited; returns when all members have.

    Args:
        invitation: What `GroupHost.open` made for this member. It serves one process, once. NCCL moves
            tensors of the device that is the calling thread's current one.
        timeout_s: Deadline for the arrival of all members and their connection.

    Raises:
        GroupTimeoutError: Some did not arrive in time; it names them. All who wait get it.
        StaleGenerationError: The group has a later generation, or its store is gone.
        PeerLostError: A member died meanwhile.
        NoTransportError: Not every member can use the backend that was asked for.
        GroupError: Another process has joined with this invitation.
        ValueError: `timeout_s` is no positive number.
    """
    deadline = Deadline.within(timeout_s)
    board = Board.connect(invitation, deadline)
    try:
        lifeline = Lifeline(address_towards((invitation.address, invitation.port)))
    except BaseException:
        board.close()
        raise
    try:
        return _join(invitation, board, lifeline, deadline)
    except BaseException:
        lifeline.close()
        board.close()
        raise


def _join(invitation: Invitation, board: Board, lifeline: Lifeline, deadline: Deadline) -> CollectiveGroup:
    _take_seat(invitation, board, lifeline)
    seats = _all_seats(invitation, board, deadline)
    watch = Watch(board, invitation, seats, lifeline)
    try:
        choice = choose_backend(invitation.backend, seats)
        fabric = _connected(invitation, board, seats, choice, watch, deadline)
    except (RuntimeError, TransportError) as error:
        raise _told(watch, error) from error
    return CollectiveGroup(Party(invitation, board, watch, fabric), lifeline, choice)


def _take_seat(invitation: Invitation, board: Board, lifeline: Lifeline) -> None:
    if (cause := board.cause()) is not None:
        raise cause.error(invitation)
    own = Seat(invitation.member, lifeline.endpoint, member_facts())
    held = Seat.decode(board.claim(f"seat/{invitation.rank}", own.encode()))
    if held != own:
        message = f"{held} has joined {invitation.label} already: an invitation serves one process, once"
        raise group_error(GroupError, invitation, message, [invitation.member])


def _all_seats(invitation: Invitation, board: Board, deadline: Deadline) -> list[Seat]:
    def look(missing: list[int]) -> None:
        if (cause := board.cause()) is not None:
            raise cause.error(invitation)
        if deadline.passed:
            raise late(missing)

    def late(missing: list[int]) -> GroupError:
        names = [invitation.members[rank] for rank in missing]
        message = (
            f"{', '.join(names)} did not arrive in {invitation.label} within {deadline.timeout_s:g} s, where "
            f"{len(invitation.members) - len(names)} of {len(invitation.members)} members are"
        )
        error = group_error(GroupTimeoutError, invitation, message, names)
        return board.blame(Cause.of(error, invitation.member)).error(invitation)

    found = board.await_all("seat", range(len(invitation.members)), look)
    return [Seat.decode(text) for text in found.values()]


def _connected(
    invitation: Invitation, board: Board, seats: list[Seat], choice: Choice, watch: Watch, deadline: Deadline
) -> Fabric:
    left = deadline.left_s + _GRACE_S  # Who did not connect is told by this member's own deadline.
    store = board.for_group(left)
    gate = Gate(f"connection of {invitation.label}")
    device = device_for(choice.name)  # In the caller's thread.
    building = gate.submit(lambda: fabric_for(choice.name, store, invitation.rank, seats, left, device))
    try:
        fabric = _awaited(building, lambda: watch.look(range(len(seats))), deadline, invitation, board)
    except BaseException:
        gate.abandon()
        raise
    gate.close()
    try:
        watch.look(())  # Somebody may have given up on whoever was late.
    except BaseException:
        fabric.close()
        raise
    return fabric


def _awaited(
    future: "Future[T]", look: Callable[[], None], deadline: Deadline, invitation: Invitation, board: Board
) -> T:
    while True:
        try:
            return future.result(_TICK_S)
        except TimeoutError:
            if future.done():  # It came at the last moment, or is itself a timeout.
                return future.result()
        look()
        if deadline.passed:
            names = _silent(invitation, board)
            who = ", ".join(names) or "the members"
            message = f"{who} of {invitation.label} did not connect within {deadline.timeout_s:g} s"
            raise group_error(GroupTimeoutError, invitation, message, names)


def _silent(invitation: Invitation, board: Board) -> list[str]:
    """Who arrived, and has told the others nothing of where it can be reached since."""
    found = {name: board.has(f"{GROUP_KEYS}/0/{rank}") for rank, name in enumerate(invitation.members)}
    return [name for name, has_told in found.items() if not has_told] if any(found.values()) else []


def _told(watch: Watch, error: Exception) -> Exception:
    """The error of a connection, told to the others; a backend that can't be had is refused on all alike."""
    if isinstance(error, RuntimeError):
        error = watch.explain(error)
    return watch.blame(error) if isinstance(error, GroupError) else error
