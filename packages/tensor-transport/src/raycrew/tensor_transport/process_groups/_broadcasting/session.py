"""One broadcast: agree on what will be moved, move it, and hear from all that they have it."""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

import torch

from raycrew.tensor_transport.errors import (
    GroupMismatchError,
    GroupTimeoutError,
    TransportTimeoutError,
)
from raycrew.tensor_transport.process_groups._broadcasting.fabric import Fabric
from raycrew.tensor_transport.process_groups._broadcasting.pieces import (
    PIECE_BYTES,
    SMALL_BYTES,
    Piece,
    plan_pieces,
)
from raycrew.tensor_transport.process_groups._membership import Board, Invitation, Watch, group_error
from raycrew.tensor_transport.transports import Guard

_SLICE_S = 0.25
_NO_DEADLINE_S = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Wish:
    """What one member wants of an operation; what all have to agree on before a byte moves.

    Attributes:
        role: What it does in it.
        buffers: How many buffers it has.
        size_bytes: Their bytes together.
        sizes: Digest of the size of each, and of the rules by which they are cut.
        manifest: What the caller says that they are.
    """

    role: Literal["send", "receive", "cancel"]
    buffers: int = 0
    size_bytes: int = 0
    sizes: str = ""
    manifest: str = ""

    @classmethod
    def of(cls, role: Literal["send", "receive"], sizes: Sequence[int], manifest: str) -> Self:
        """The wish for buffers of these sizes."""
        text = json.dumps([list(sizes), PIECE_BYTES, SMALL_BYTES])
        return cls(role, len(sizes), sum(sizes), hashlib.sha256(text.encode()).hexdigest()[:16], manifest)

    def __str__(self) -> str:
        what = f" of manifest {self.manifest!r}" if self.manifest else ""
        return f"{self.role} {self.buffers} buffers, {self.size_bytes} bytes (sizes {self.sizes}){what}"


def agreed_root(wishes: dict[str, Wish]) -> int | str:
    """The rank that sends; or what is wrong with what the members want, by their names in rank order."""
    senders = [name for name, wish in wishes.items() if wish.role == "send"]
    if cancelled := [name for name, wish in wishes.items() if wish.role == "cancel"]:
        return f"{', '.join(cancelled)} cancelled it"
    if len(senders) != 1:
        return f"one member has to send, not {', '.join(senders) or 'none'}"
    if len({(wish.sizes, wish.buffers, wish.size_bytes) for wish in wishes.values()}) > 1:
        return "the buffers of members differ in number or size"
    if len({wish.manifest for wish in wishes.values()}) > 1:
        return "the manifests of members differ"
    return list(wishes).index(senders[0])


class Party:
    """What a member's operations need of its group."""

    def __init__(self, invitation: Invitation, board: Board, watch: Watch, fabric: Fabric) -> None:
        self.invitation = invitation
        self.board = board
        self.watch = watch
        self.fabric = fabric
        self._posted: list[tuple[int, str]] = []

    def agree(self, turn: int, wish: Wish, guard: Guard) -> int:
        """Say what this member wants of the operation `turn`, and hear what the others do.

        Returns:
            The rank that sends.

        Raises:
            GroupMismatchError: They want different things.
        """
        self._post("wish", turn, json.dumps(asdict(wish)))
        said = self._hear(f"wish/{turn}", guard, "did not take part")
        self._forget(turn)
        names = self.invitation.members
        wishes = {names[rank]: Wish(**json.loads(text)) for rank, text in said.items()}
        root = agreed_root(wishes)
        if isinstance(root, int):
            return root
        told = "; ".join(f"{name}: {found}" for name, found in wishes.items())
        error = group_error(
            GroupMismatchError,
            self.invitation,
            f"operation {turn} of {self.invitation.label} moved nothing: {root} ({told})",
            [name for name, found in wishes.items() if found != wish],
        )
        error.wanted = {name: str(found) for name, found in wishes.items()}  # type: ignore[attr-defined]
        raise error

    def give_up(self, turn: int) -> None:
        """Tell the others that this member takes no part in an operation; they move nothing."""
        self._post("wish", turn, json.dumps(asdict(Wish("cancel"))))

    def confirm(self, turn: int, guard: Guard) -> None:
        """Say that this member has everything, and wait until all do."""
        self._post("done", turn, "")
        self._hear(f"done/{turn}", guard, "did not confirm that they have all bytes")

    def move(
        self, root: int, views: Sequence[torch.Tensor], window_bytes: int, guard: Guard, *, sends: bool
    ) -> None:
        """Move buffers, with at most `window_bytes` under way, or one piece."""
        mover = _Mover(self, root, views, guard, sends)
        with mover.until_settled():
            for piece in plan_pieces([view.numel() for view in views]):
                mover.make_room(window_bytes - piece.size_bytes)
                mover.begin(piece)
            mover.make_room(0)

    def wait(self, work: Any, guard: Guard) -> None:
        """Wait for a piece, in slices: between them others are listened to."""
        while not self.fabric.wait(work, _SLICE_S):
            self.check(guard, "did not send or take the bytes")
            self.watch.look(range(len(self.invitation.members)))

    def settle(self, guard: Guard) -> None:
        """Wait until the bytes are where they belong, copies on a device included."""
        while not self.fabric.settle(_SLICE_S):
            self.check(guard, "did not send or take the bytes")
            self.watch.look(range(len(self.invitation.members)))

    def check(self, guard: Guard, what: str, missing: Sequence[int] = ()) -> None:
        """Return if the operation may go on.

        Raises:
            TransferCancelledError: It was cancelled.
            GroupTimeoutError: Its time is over.
        """
        try:
            guard.check()
        except TransportTimeoutError as error:
            names = [self.invitation.members[rank] for rank in missing]
            message = f"{error}: {', '.join(names) or 'somebody'} {what}"
            raise group_error(GroupTimeoutError, self.invitation, message, names) from error

    def _hear(self, topic: str, guard: Guard, complaint: str) -> dict[int, str]:
        def look(missing: list[int]) -> None:
            self.watch.look(missing)
            self.check(guard, complaint, missing)

        return self.board.await_all(topic, range(len(self.invitation.members)), look)

    def _post(self, topic: str, turn: int, text: str) -> None:
        key = f"{topic}/{turn}/{self.invitation.rank}"
        self._posted.append((turn, key))
        self.board.post(key, text)

    def _forget(self, turn: int) -> None:
        """Whoever takes part in this operation has left those before it."""
        for _, key in (posted for posted in self._posted if posted[0] < turn):
            self.board.drop(key)
        self._posted = [posted for posted in self._posted if posted[0] >= turn]


@dataclass(slots=True)
class _Flight:
    """A piece under way."""

    work: Any
    size_bytes: int
    landed: Callable[[], None]


class _Mover:
    """Pieces under way, oldest first."""

    def __init__(
        self, party: Party, root: int, views: Sequence[torch.Tensor], guard: Guard, sends: bool
    ) -> None:
        self._party, self._root, self._views, self._guard, self._sends = party, root, views, guard, sends
        self._flights: deque[_Flight] = deque()
        self._spare: list[torch.Tensor] = []

    def begin(self, piece: Piece) -> None:
        """Put a piece on the wire."""
        data, landed = self._taken(piece)
        left = self._guard.left_s()
        timeout_s = _NO_DEADLINE_S if left is None else max(left, 1e-3)
        work = self._party.fabric.broadcast(data, self._root, timeout_s)
        self._flights.append(_Flight(work, piece.size_bytes, landed))

    def make_room(self, size_bytes: int) -> None:
        """Wait until at most this many bytes are under way."""
        while self._flights and sum(flight.size_bytes for flight in self._flights) > max(size_bytes, 0):
            self._party.wait(self._flights[0].work, self._guard)
            self._flights.popleft().landed()
        self._party.check(self._guard, "did not send or take the bytes")

    @contextmanager
    def until_settled(self) -> Iterator[None]:
        """After a failure, end what is under way: nothing is written to the buffers afterwards."""
        try:
            yield
        except BaseException:
            held = [*self._views, *self._flights, *self._spare]
            self._party.fabric.end([flight.work for flight in self._flights], held)
            self._flights.clear()
            raise

    def _taken(self, piece: Piece) -> tuple[torch.Tensor, Callable[[], None]]:
        parts = [self._views[run.index][run.start : run.stop] for run in piece.runs]
        if piece.in_place:
            return parts[0], _nothing
        whole = self._spare.pop() if self._spare else _staging(parts[0].device)
        staged = whole[: piece.size_bytes]
        places = torch.split(staged, [run.size_bytes for run in piece.runs])
        pairs = list(zip(places, parts, strict=True))
        if self._sends:
            for there, here in pairs:
                there.copy_(here)

        def landed() -> None:
            if not self._sends:
                for there, here in pairs:
                    here.copy_(there)
            self._spare.append(whole)

        return staged, landed


def _staging(device: torch.device) -> torch.Tensor:
    return torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device)


def _nothing() -> None:
    pass
