"""Whether two layouts fit each other, and whether the targets' parameters are filled, each element once."""

from fnmatch import fnmatchcase

from raycrew.tensor_transport.errors import ReshardError
from raycrew.tensor_transport.weights.resharding._layouts import (
    Layout,
    Region,
    Share,
    TensorLayout,
    covered_once,
)


def check_names(source: Layout, target: Layout, unused: str) -> None:
    """Raise unless both sides name the same tensors."""
    missing = sorted(target.tensors.keys() - source.tensors.keys())
    extra = sorted(source.tensors.keys() - target.tensors.keys()) if unused == "error" else []
    if missing or extra:
        told = [f"no source has {_some(missing)}"] * bool(missing)
        told += [f"no target wants {_some(extra)} (unused='ignore' leaves such out)"] * bool(extra)
        raise ReshardError(
            f"the tensors have other names on the two sides: {'; '.join(told)}; Layout.rename has them agree",
            tensor=(missing or extra)[0],
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + more


def check_agreement(
    name: str, held: TensorLayout, wanted: TensorLayout, casts: tuple[tuple[str, str], ...]
) -> None:
    """Raise unless a tensor has one shape on both sides, and one dtype or a cast that is named."""
    if held.shape != wanted.shape:
        raise ReshardError(
            f"{name!r} has shape {list(held.shape)} at the sources and {list(wanted.shape)} at the targets",
            tensor=name,
        )
    named = {dtype for pattern, dtype in casts if fnmatchcase(name, pattern)}
    if wanted.dtype not in {held.dtype, *named}:
        raise ReshardError(
            f"{name!r} is {held.dtype} at the sources and {wanted.dtype} at the targets; to have it cast, "
            f"name it: casts={{{name!r}: {wanted.dtype!r}}}",
            tensor=name,
        )


def check_targets(target: Layout) -> None:
    """Raise unless each element of each target parameter is that of one tensor, or declared as unused."""
    inside: dict[str, list[tuple[str, int]]] = {}
    for name, tensor in target.tensors.items():
        for i, parameter in enumerate(tensor.parameters or (name,)):
            inside.setdefault(parameter, []).append((name, i))
    checked: set[tuple[tuple[int, int], ...]] = set()
    for parameter, members in inside.items():
        key = tuple((id(target.tensors[name].shares), i) for name, i in members)
        if key not in checked:
            _check_parameter(parameter, [(name, i, target.tensors[name].shares) for name, i in members])
            checked.add(key)


def _check_parameter(parameter: str, members: list[tuple[str, int, tuple[Share, ...]]]) -> None:
    ranks: dict[int, list[tuple[str, Share]]] = {}
    for name, i, shares in members:
        for share in shares:
            if share.parameter == i:
                ranks.setdefault(share.rank, []).append((name, share))
    for rank, held in ranks.items():
        memory = held[0][1].memory
        for name, share in held:
            if share.memory != memory:
                raise ReshardError(f"{parameter!r} of target rank {rank} has two shapes", tensor=name)
        regions = [block.region for _, share in held for block in share.blocks] + list(memory.unused)
        wrong = covered_once(regions, Region(0, memory.shape, memory.strides))
        if wrong is not None:
            raise _not_once(parameter, rank, held, *wrong)


def _not_once(
    parameter: str, rank: int, held: list[tuple[str, Share]], kind: str, element: int
) -> ReshardError:
    memory = held[0][1].memory
    place, left = [], element
    for stride in memory.strides:
        index, left = divmod(left, stride) if stride else (0, left)
        place.append(index)
    told = {
        "gap": "gets no value, and is not declared as unused",
        "overlap": "gets several values",
        "outside": "is not in that memory",
    }
    names = ", ".join(sorted(repr(name) for name, _ in held))
    return ReshardError(
        f"{parameter!r} of target rank {rank}, of shape {list(memory.shape)}, holds {names}: its element "
        f"{place} {told[kind]}",
        tensor=parameter,
        region=str(place),
    )
