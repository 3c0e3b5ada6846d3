"""The generator's side: which version is held, and how a process comes to another one."""

import contextlib
import math
import operator
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Literal, SupportsIndex, overload

import torch

from raycrew.tensor_transport._bytes import Belonging
from raycrew.tensor_transport.errors import (
    BucketFetchError,
    StaleVersionError,
    TransportClosedError,
    TransportError,
    WeightUpdateError,
)
from raycrew.tensor_transport.protocols import ByteStore
from raycrew.tensor_transport.transports import PullTransport
from raycrew.tensor_transport.weights._directory import Record, WeightDirectory
from raycrew.tensor_transport.weights._receiving.applying import Applier
from raycrew.tensor_transport.weights._receiving.chain import apply_chain
from raycrew.tensor_transport.weights._receiving.held import Published
from raycrew.tensor_transport.weights._receiving.loading import Ahead, Load
from raycrew.tensor_transport.weights._receiving.member import Member
from raycrew.tensor_transport.weights._receiving.receipt import WeightReceipt
from raycrew.tensor_transport.weights._receiving.rollback import Rollback, RollbackKind
from raycrew.tensor_transport.weights._update import WeightUpdate, join_updates


class WeightReceiver(Belonging):
    """Applies published versions to whatever `load` loads into.

    An update is a transaction: its names, shapes and dtypes are compared before a byte moves, every
    bucket is fetched (the next one while the current one loads) and its checksum verified before its
    tensors are handed to `load`, and `version` changes only after all of them were loaded. After a
    failure the previous version goes on being reported; `intact` tells whether the weights are still
    its own, or a mixture because loading had begun. Applying the same or any later update repairs that.

    With a `directory` it hears of versions by their number: `prepare(version)` fetches while the version is
    still being published, `apply(version)` loads it, and `pull()` brings a late or restarted receiver to the
    latest one. A version that `sync_weights` began is kept only if all receivers loaded it; else each returns
    to what it had, which takes a `rollback`.

    Args:
        load: Called with an iterator of (name, tensor) on the CPU, or where a route of device "cuda" has
            them, which it has to exhaust. It may keep the tensors; it must not write to them where `borrow`
            is set, or for a "shadow". Where it finds that it can't before it changes anything, it raises
            LoadRefusedError: what is held stays intact.
        expected: The names, shapes and dtypes to accept: a state dict (meta tensors will do). Without it, the
            first update that commits sets them. Names that are one tensor in it (also one on the meta device:
            make one for each name), or have some memory in common as `w` and `w[:4]` have, have to have the
            same elements there in an update, and a partial one has all of them or none. All of the update is
            fetched before `load` is given any of it where these are sent apart.
        store: Where the buckets are, a store or a transport: Ray's object store unless given.
        borrow: Hand out tensors over the store's memory itself instead of a copy.
        verify_first: Fetch and verify all buckets before `load` is called, so that a lost or damaged bucket
            never leaves a mixture; needs memory for the whole update unless `borrow` is set.
        verify: Compare the checksums of buckets; where publisher and receiver share a node's memory, they
            can be spared.
        rollback: How to return to the version before when `load` fails half-way, by calling it once more.
            "shadow": the buckets of what is loaded are kept, which takes the memory of one model, two during
            an update, and no time. "refetch": they are fetched again, which takes no memory, and the store
            has to keep that version. "none": the weights are a mixture until an update is applied.
        deltas: The `DeltaTarget` whose `load` is called: updates say what changed since the one before, in
            bytes of another size each time. It knows by itself what fits, and the way back.
        ahead: Called by `prepare` with an iterator like that of `load`, as the buckets come, to make
            something of them that leaves what is held alone. It returns what `apply` calls in place of
            `load`, with the same tensors, by the `DeltaTarget` if there is one; or None, for `load`, which is
            called, too, where it left tensors. No version is held from that call on, as it may change
            something before it takes a tensor, unless it raises LoadRefusedError.
        directory: Where versions are found by number.
        name: What the directory calls this receiver; unique. One that was restarted may have its name again:
            it holds nothing then, and an update that waited for the one before is given up at once. Without
            a name, nobody knows that a receiver died while it loaded, and the others wait for its vote until
            the deadline of the update.

    Raises:
        ValueError: There is no such rollback.
        DirectoryLostError: The directory that is to know the name does not answer.
    """

    def __init__(
        self,
        load: Load,
        *,
        expected: Mapping[str, torch.Tensor] | None = None,
        store: ByteStore | PullTransport | None = None,
        borrow: bool = False,
        verify_first: bool = False,
        verify: bool = True,
        rollback: RollbackKind = "none",
        deltas: Rollback | None = None,
        ahead: Ahead | None = None,
        directory: WeightDirectory | None = None,
        name: str | None = None,
    ) -> None:
        self._member = Member(directory, name or uuid.uuid4().hex[:12])
        if name is not None:
            self._member.arrive()
        self._applier = Applier(
            load,
            self._member,
            expected=expected,
            store=store,
            borrow=borrow,
            verify_first=verify_first,
            verify=verify,
            rollback=rollback,
            deltas=deltas,
            ahead=ahead,
        )
        super().__init__()
        self._applying = False
        self._lock = threading.RLock()  # A `load` that asks for another update is told so.

    @property
    def name(self) -> str:
        """What the directory calls this receiver."""
        return self._member.name

    @property
    def version(self) -> int | None:
        """The version of the last update that was applied whole, None before the first.

        While another one is loaded, and until it is decided, `intact` is False.
        """
        return self._applier.held.version

    @property
    def intact(self) -> bool:
        """Whether the weights are those of `version`.

        False from the first tensor that `load` is given to the end of the update, as other threads see it,
        and after one that failed while loading.
        """
        return self._applier.held.intact

    def tag(self, rows: int) -> torch.Tensor:
        """The version for each of so many rows that were made with these weights: int64, [rows].

        Without a directory a restarted trainer's versions count from 1 again; see `require`.

        A thread that makes rows while another one applies updates has to ask before and after, and to drop
        the rows where it is refused once, or the answers differ.

        Raises:
            StaleWeightsError: No version is held, the weights are a mixture, or another version is loaded or
                not decided yet.
        """
        return torch.full((rows,), self.require(), dtype=torch.int64)

    def require(self, version: int | Published | None = None) -> int:
        """The version that is held, if things may be made with these weights: asks nobody, and costs nothing.

        A process that was restarted holds none, whatever its constructor loaded, until it pulls or is
        updated. Who hands what is to be used along with each call is never served by a process that missed
        it.

        Only a directory never uses a number again. Without one, each publisher counts from 1, also that of a
        restarted trainer, and a number alone can't tell the new one's version 5 from the version 5 of the one
        before: hand on what was published. A number below the one that is held is refused there.

        Args:
            version: That, or a later one; any unless given. A number; or a `WeightUpdate`, or the report of
                `sync_weights`, which say whose version it is, too.

        Raises:
            StaleWeightsError: No version is held, an older one, one of another publisher (unless that
                replaced the required one here), a mixture (see `tag`), or one that may be older as far as the
                number tells.
            WeightUpdateError: It is one part of several: `join_updates` makes one of them.
            TypeError: It is no number, and nothing that was published.
        """
        if isinstance(version, WeightUpdate):
            version = join_updates([version])
        return self._applier.held.check(version)

    def apply(
        self, update: WeightUpdate | SupportsIndex, *, timeout_s: float | None = 600.0
    ) -> WeightReceipt:
        """Fetch, verify and load one update; holding it already is a success that moves nothing.

        A version that is given by its number, and that `sync_weights` began, is decided by the directory:
        this returns when all receivers have loaded it, and else rolls back and raises. If such a version is a
        partial one, a receiver that holds none, a mixture, or one that it can't be added to, as it was no
        recipient of those since, comes to the version before it first, which the directory has to keep.

        Args:
            update: A complete update, or the number of a version in the directory.
            timeout_s: Deadline of all of it; a rollback that has to fetch has as long again, or a minute.

        Raises:
            StaleVersionError: A later version is held, or the update is from a publisher that was replaced.
            ManifestMismatchError: Names, shapes or dtypes differ from what this receiver holds.
            BaseVersionError: A partial update, to be added to another version than is held.
            BucketFetchError: A bucket is lost, or did not arrive in time.
            ChecksumMismatchError: A bucket arrived damaged.
            UpdateAbortedError: The version was given up, by a publisher or by another receiver.
            DirectoryLostError: The directory does not answer.
            WeightUpdateError: `load` raised, or did not take every tensor.
            TransportClosedError: The receiver is closed.
            TransportError: The receiver is another process's, or `load` called this.
            ValueError: `timeout_s` is not a number.
        """
        told = update if isinstance(update, WeightUpdate | int) else operator.index(update)
        with self._transaction(told if isinstance(told, int) else told.version, timeout_s):
            return self._applier.apply(told, timeout_s)

    def prepare(self, version: SupportsIndex, *, timeout_s: float | None = 600.0) -> WeightReceipt:
        """Fetch and verify a version while it is being published; `apply(version)` then only loads it.

        The weights are not touched, so generation may go on. It takes memory for the whole update, unless the
        store's own memory is borrowed or mapped. (Who holds no version, or a mixture, and is to add a partial
        one, comes to the version before that first.)

        Raises:
            WeightUpdateError: As `apply`, or `ahead` raised, or returned what can't be called.
        """
        number = version if isinstance(version, int) else operator.index(version)
        with self._transaction(number, timeout_s):
            return self._applier.prepare(number, timeout_s)

    @overload
    def pull(
        self,
        version: SupportsIndex | None = None,
        *,
        timeout_s: float | None = 600.0,
        missing_ok: Literal[False] = False,
    ) -> WeightReceipt: ...

    @overload
    def pull(
        self, version: None = None, *, timeout_s: float | None = 600.0, missing_ok: bool
    ) -> WeightReceipt | None: ...

    def pull(
        self,
        version: SupportsIndex | None = None,
        *,
        timeout_s: float | None = 600.0,
        missing_ok: bool = False,
    ) -> WeightReceipt | None:
        """Come to a version of the directory, the latest unless given, with all those it has to be added to.

        For receivers that are late or were restarted. What is replaced by a later version while it is fetched
        is tried again with that one; one that another thread applied meanwhile is as good.

        Args:
            version: The latest unless given.
            timeout_s: Deadline of all of it.
            missing_ok: Return None, and keep what is held, where the directory has no version: before the
                first one, always with `keep=0`, and once its publisher is closed. Who was restarted then goes
                on, and its weights are refused until the next update.

        Raises:
            ValueError: A version is given that has to be there, and need not.
            BucketFetchError: There is no version, or it is not kept.
            WeightUpdateError: As `apply`.
        """
        if missing_ok and version is not None:
            raise ValueError(f"missing_ok= is for the latest version: version {version} was asked for")
        number = None if version is None else operator.index(version)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._check_usable()
        while True:
            before = self._applier.held.number
            chain = self._chain(number, missing_ok)
            if chain is None:
                return None
            try:
                return self._pull(chain, deadline)
            except (BucketFetchError, StaleVersionError) as error:
                latest = self._member.directory.latest
                is_gone = latest is None and not (missing_ok and self.intact)
                others = isinstance(error, StaleVersionError) and self._applier.held.number != before
                if number is not None or is_gone or (latest == chain[-1] and not others):
                    raise

    def close(self) -> None:
        """Leave the directory, and give up what is kept for a rollback; idempotent.

        It waits for an update that another thread applies. In a forked child it does nothing: the parent
        stays a receiver.

        Raises:
            TransportError: `load` called this.
        """
        if self._is_parents:
            return
        with self._lock:
            if self._closed:
                return
            self._check_idle()
            self._closed = True
            self._applier.forget()
            self._member.leave()

    @contextlib.contextmanager
    def _transaction(self, version: int, timeout_s: float | None) -> Iterator[None]:
        """One update at a time; its errors say what is held afterwards."""
        if timeout_s is not None and math.isnan(timeout_s):  # A deadline that never comes.
            raise ValueError(f"timeout_s is a number of seconds, not {timeout_s}")
        self._check_usable()
        with self._lock:
            self._check_usable()
            self._check_idle()
            self._applying = True
            try:
                yield
            except WeightUpdateError as error:
                held = self._applier.held
                error.version, error.current_version, error.intact = int(version), held.version, held.intact
                error.add_note(held.standing())
                raise
            finally:
                self._applying = False

    def _check_idle(self) -> None:
        """Refuse, with the lock held, what this thread asks for while it applies an update."""
        if self._applying:
            raise TransportError("a WeightReceiver was called by the load() or ahead() that it is within")

    def _check_usable(self) -> None:
        self._check_process()
        if self._closed:
            raise TransportClosedError("this WeightReceiver is closed")

    def _chain(self, version: int | None, missing_ok: bool) -> list[int] | None:
        """The versions to apply one after another; None where there is none at all, and none need be."""
        try:
            return self._member.directory.ask(Record.chain, version, self._applier.held.number)
        except BucketFetchError as error:
            if missing_ok and not error.version:
                return None
            raise

    def _pull(self, chain: list[int], deadline: float | None) -> WeightReceipt:
        had = WeightReceipt(self.version or 0, 0, 0.0, 0.0, self.version)

        def apply(number: int, left_s: float | None) -> WeightReceipt:
            return self.apply(number, timeout_s=left_s)

        return apply_chain(chain, deadline, lambda: self._applier.held, apply) or had
