"""Hands the tensors of a version to `load`, and notes what was handed out."""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch

from raycrew.tensor_transport.errors import LoadRefusedError, WeightUpdateError
from raycrew.tensor_transport.weights._receiving.fetching import Assembler, Fetched, Heading, Stream
from raycrew.tensor_transport.weights._receiving.rollback import bare
from raycrew.tensor_transport.weights._receiving.twins import Ties, Twins
from raycrew.tensor_transport.weights._update import (
    Schema,
    Stopwatch,
    TensorEntry,
    check_cover,
    compare_schemas,
)

Load = Callable[[Iterator[tuple[str, torch.Tensor]]], Any]
Ahead = Callable[[Iterator[tuple[str, torch.Tensor]]], Load | None]


class Loading:
    """One version on its way into a model.

    Attributes:
        touched: Whether `load` was given anything.
        fetched: The buckets so far; without their bytes unless they are kept.
        size_bytes: Bytes of the buckets so far.
        taken: How many tensors `load` took.
        is_whole: Whether all tensors were handed out, to the end.
        failure: What went wrong with the buckets, or broke off their use.
    """

    def __init__(
        self,
        heading: Heading,
        expected: Schema | None,
        *,
        keep: bool,
        on_touch: Callable[[int], object] = lambda _: None,
        ties: Ties | None = None,
    ) -> None:
        self.touched = self.is_whole = False
        self.failure: BaseException | None = None
        self.fetched: list[Fetched] = []
        self.size_bytes = self.taken = 0
        self._heading, self._expected, self._keep = heading, expected, keep
        self._on_touch = on_touch
        self._twins = Twins(heading, ties or Ties())
        self._schema: dict[str, tuple[str, tuple[int, ...]]] = {}

    @property
    def version(self) -> int:
        """Which one."""
        return self._heading.version

    @property
    def names(self) -> frozenset[str]:
        """The names of the version, as far as they are known."""
        return frozenset(self._schema if self._heading.schema is None else self._heading.schema)

    @property
    def schema(self) -> Schema:
        """Name -> (dtype, shape)."""
        return self._schema if self._heading.schema is None else self._heading.schema

    def tensors(self, buckets: Iterable[Fetched]) -> Generator[tuple[str, torch.Tensor], None, None]:
        """(name, tensor) of all buckets, those that come in pieces put together."""
        assembler = Assembler(self._heading.version)
        try:
            for fetched in self._twins.compared(self._noted(buckets)):
                for name, tensor in assembler.whole(fetched.tensors()):
                    self._twins.compare(name, tensor)
                    self.touch()
                    self.taken += 1
                    yield name, tensor
            assembler.check_empty()
            self._check_all()
            self.is_whole = True
        except GeneratorExit:  # Whoever closes it has no use for the others.
            raise
        except BaseException as error:
            self.failure = error
            raise

    def took_all(self, rest: Iterator[tuple[str, torch.Tensor]]) -> bool:
        """Whether `load` left nothing; raises what went wrong after all."""
        taken = self.taken
        is_left = next(rest, None) is not None
        self.taken = taken
        return not is_left and self.is_whole and taken == len(self.schema)

    def _noted(self, buckets: Iterable[Fetched]) -> Iterator[Fetched]:
        for fetched in buckets:
            self._note(fetched)
            yield fetched

    def touch(self) -> None:
        """Something of it goes into the weights from now on."""
        if not self.touched:
            self._on_touch(self.version)
        self.touched = True

    def _note(self, fetched: Fetched) -> None:
        self.size_bytes += fetched.data.numel()
        self.fetched.append(fetched if self._keep else bare(fetched))
        if self._heading.schema is not None:
            return
        fresh = {entry.name: (entry.dtype, entry.full_shape) for entry in fetched.parcel.entries}
        if self._expected is not None:
            compare_schemas(self._expected, fresh, self._heading.version, partial=True)
        self._schema |= fresh

    def _check_all(self) -> None:
        """What came with the buckets is checked when all are there."""
        if self._heading.schema is not None:
            return
        entries: list[TensorEntry] = [e for fetched in self.fetched for e in fetched.parcel.entries]
        check_cover(entries, self._heading.version)
        if self._expected is not None:
            partial = self._heading.bases is not None
            compare_schemas(self._expected, self._schema, self._heading.version, partial=partial)


def load_whole(load: Load, loading: Loading, stream: Iterable[Fetched], watch: Stopwatch) -> None:
    """Load a version.

    Raises:
        WeightUpdateError: `load` raised, or did not take every tensor.
        LoadRefusedError: `load` raised it, and changed nothing.
        Exception: What went wrong with the buckets.
    """
    _, took_all = _hand_out(load, "load", loading, stream, watch)
    if not took_all:
        raise WeightUpdateError(
            f"update {loading.version}: load() took {loading.taken} of {len(loading.schema)} tensors; "
            "it has to exhaust its iterator"
        )


def load_ahead(ahead: Ahead, loading: Loading, stream: Stream, watch: Stopwatch) -> Load | None:
    """Fetch a version, and have something made ready of it meanwhile; what loads it then.

    Args:
        ahead: What makes something ready.
        loading: Has all buckets afterwards.
        stream: The buckets.
        watch: Measures it.

    Raises:
        WeightUpdateError: `ahead` raised, or returned what can't be called.
        LoadRefusedError: `ahead` raised it.
        Exception: What went wrong with the buckets.
    """
    with contextlib.closing(iter(stream)) as buckets:
        load, took_all = _hand_out(ahead, "ahead", loading, buckets, watch)
        if load is not None and not callable(load):
            what = type(load).__name__
            raise WeightUpdateError(f"update {loading.version}: ahead() returned a {what}, no callable")
        loading.fetched.extend(buckets)  # Those that it left.
    return load if took_all else None


def _hand_out(
    use: Callable[[Iterator[tuple[str, torch.Tensor]]], Any],
    name: str,
    loading: Loading,
    buckets: Iterable[Fetched],
    watch: Stopwatch,
) -> tuple[Any, bool]:
    """What is returned by who is given the tensors, and whether it took all of them; see `load_whole`."""
    tensors = loading.tensors(buckets)
    try:
        with watch.measure(name):
            made = use(tensors)
    except LoadRefusedError:
        raise
    except Exception as error:
        if loading.failure is None:
            raise WeightUpdateError(f"update {loading.version}: {name}() raised {error!r}") from error
        raise loading.failure from (None if error is loading.failure else error)
    else:
        if loading.failure is not None:
            raise loading.failure
        return made, loading.took_all(tensors)
    finally:
        tensors.close()
        loading.failure = None  # It would hold what holds it, and all buckets.
