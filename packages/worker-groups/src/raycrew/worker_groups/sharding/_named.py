"""Named axes over ranks."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import Any


class NamedSharding:
    """Ranks laid out over named axes, such as data, pipeline and tensor parallel.

    Look-ups by rank or by full coordinates are one dictionary access.

    Args:
        layout: Ranks as nested sequences, or anything with `tolist()` (a numpy array, a torch tensor);
            `layout[i][j]` is the rank at coordinates (i, j). Each rank appears once.
        names: One name per axis, outermost first.

    Raises:
        ValueError: The layout is ragged or empty, a rank appears twice, or names and axes don't match.

    Examples:
        >>> axes = NamedSharding([[0, 1], [2, 3]], ["dp", "tp"])
        >>> axes.get_ranks_by_coord(dp=1), axes.get_axis_size("tp")
        ([2, 3], 2)
    """

    def __init__(self, layout: Any, names: Sequence[str]) -> None:
        nested = layout.tolist() if hasattr(layout, "tolist") else layout
        shape = _shape(nested)
        if len(names) != len(shape):
            raise ValueError(f"{len(names)} name(s) for a layout of {len(shape)} axes")
        if len(set(names)) != len(names):
            raise ValueError(f"axis names are repeated: {list(names)}")
        self._names = tuple(names)
        self._shape = shape
        self._nested = nested
        self._axis = {name: axis for axis, name in enumerate(self._names)}
        self._rank_at = {coords: _at(nested, coords) for coords in product(*map(range, shape))}
        self._coords_of = {rank: coords for coords, rank in self._rank_at.items()}
        if len(self._coords_of) != len(self._rank_at):
            raise ValueError("a rank appears more than once in the layout")

    @property
    def names(self) -> list[str]:
        """Axis names, outermost first."""
        return list(self._names)

    @property
    def shape(self) -> Mapping[str, int]:
        """Size of each axis by name."""
        return MappingProxyType(dict(zip(self._names, self._shape, strict=True)))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._rank_at)

    @property
    def layout(self) -> Any:
        """The ranks as nested lists."""
        return self._nested

    def __iter__(self) -> Iterator[int]:
        return iter(self._rank_at.values())

    def __contains__(self, rank: object) -> bool:
        return rank in self._coords_of

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NamedSharding):
            return NotImplemented
        return self._names == other._names and self._rank_at == other._rank_at

    def __hash__(self) -> int:
        return hash((self._names, tuple(self._rank_at.values())))

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.shape.items())
        return f"NamedSharding({axes})"

    def get_axis_index(self, name: str) -> int:
        """Position of a named axis.

        Raises:
            ValueError: There is no such axis.
        """
        try:
            return self._axis[name]
        except KeyError:
            raise ValueError(f"no axis {name!r}; there are {list(self._names)}") from None

    def get_axis_size(self, name: str) -> int:
        """Size of a named axis."""
        return self._shape[self.get_axis_index(name)]

    def get_worker_coords(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank, by axis name.

        Raises:
            ValueError: The rank is not in the layout.
        """
        return dict(zip(self._names, self._coordinates(rank), strict=True))

    def get_rank(self, **coords: int) -> int:
        """The rank at full coordinates.

        Raises:
            ValueError: An axis is unknown or missing, or a coordinate out of range.
        """
        self._check(coords)
        if missing := [name for name in self._names if name not in coords]:
            raise ValueError(f"coordinates on {missing} are missing")
        return self._rank_at[tuple(coords[name] for name in self._names)]

    def get_ranks_by_coord(self, **coords: int) -> list[int]:
        """All ranks at the given coordinates, in layout order; axes that are not named are free.

        Raises:
            ValueError: An axis is unknown, or a coordinate out of range.
        """
        self._check(coords)
        axes = ([coords[n]] if n in coords else range(s) for n, s in self.shape.items())
        return [self._rank_at[at] for at in product(*axes)]

    def get_ranks(self, **coords: int) -> "NamedSharding | int":
        """The sub-layout at the given coordinates, over the axes that remain; one rank if none remains.

        Raises:
            ValueError: An axis is unknown, or a coordinate out of range.
        """
        ranks = iter(self.get_ranks_by_coord(**coords))
        rest = [(name, size) for name, size in self.shape.items() if name not in coords]
        if not rest:
            return next(ranks)
        return NamedSharding(_fold(ranks, [size for _, size in rest]), [name for name, _ in rest])

    def _coordinates(self, rank: int) -> tuple[int, ...]:
        try:
            return self._coords_of[rank]
        except KeyError:
            raise ValueError(f"rank {rank} is not in this layout of {self.size} ranks") from None

    def _check(self, coords: Mapping[str, int]) -> None:
        for name, value in coords.items():
            size = self.get_axis_size(name)
            if not 0 <= value < size:
                raise ValueError(f"coordinate {value} on axis {name!r} is outside 0 to {size - 1}")


def check_axes(sharding: NamedSharding | None, n_workers: int) -> None:
    """Check that named axes are over the ranks of a group.

    Raises:
        ValueError: They are over others.
    """
    if sharding is not None and set(sharding) != set(range(n_workers)):
        raise ValueError(
            f"sharding_annotations has {sharding.size} ranks, the group {n_workers}: 0 to {n_workers - 1}"
        )


def _shape(nested: Any) -> tuple[int, ...]:
    if isinstance(nested, int) and not isinstance(nested, bool):
        return ()
    if not isinstance(nested, Sequence) or isinstance(nested, str):
        raise ValueError(f"a layout holds ranks, not {type(nested).__name__}")
    if not nested:
        raise ValueError("a layout has no empty axis")
    shapes = {_shape(part) for part in nested}
    if len(shapes) != 1:
        raise ValueError("the layout is ragged")
    return (len(nested), *shapes.pop())


def _at(nested: Any, coords: Sequence[int]) -> int:
    for coordinate in coords:
        nested = nested[coordinate]
    return int(nested)


def _fold(values: Iterator[int], sizes: Sequence[int]) -> Any:
    if not sizes:
        return next(values)
    return [_fold(values, sizes[1:]) for _ in range(sizes[0])]
