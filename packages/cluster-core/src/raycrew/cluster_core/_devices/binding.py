"""Which device a process holds, and how it addresses that device: one table, no side effects."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DeviceBinding:
    """The device of one process.

    Attributes:
        kind: "cpu", "cuda", "rocm", "xpu", "npu", "tpu", "hpu", "neuron" or another accelerator's name.
        device_index: Physical index on the node; None without a device, or when only its UUID is known.
        local_index: What this process passes to `set_device`; None without a device.
        environment: Variables to set before user code, so that the two indices become true.
        device_ids: All ids that Ray assigned, physical order first.
    """

    kind: str
    device_index: int | None = None
    local_index: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    device_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Accelerator:
    """One row: how a kind of device is named, masked, and left unmasked."""

    resource: str
    kind: str
    visible: str
    keep_flag: str
    aliases: tuple[str, ...] = ()
    prefix: str = ""


_KEEP = "RAY_EXPERIMENTAL_NOSET_"

# For one resource name the rows are tried from top to bottom; the last one is its default.
_ACCELERATORS = (
    _Accelerator(
        "GPU", "rocm", "HIP_VISIBLE_DEVICES", f"{_KEEP}HIP_VISIBLE_DEVICES", ("CUDA_VISIBLE_DEVICES",)
    ),
    _Accelerator("GPU", "xpu", "ZE_AFFINITY_MASK", f"{_KEEP}ZE_AFFINITY_MASK"),
    _Accelerator(
        "GPU", "xpu", "ONEAPI_DEVICE_SELECTOR", f"{_KEEP}ONEAPI_DEVICE_SELECTOR", prefix="level_zero:"
    ),
    _Accelerator("GPU", "cuda", "CUDA_VISIBLE_DEVICES", f"{_KEEP}CUDA_VISIBLE_DEVICES"),
    _Accelerator("NPU", "npu", "ASCEND_RT_VISIBLE_DEVICES", f"{_KEEP}ASCEND_RT_VISIBLE_DEVICES"),
    _Accelerator("TPU", "tpu", "TPU_VISIBLE_CHIPS", f"{_KEEP}TPU_VISIBLE_CHIPS"),
    _Accelerator("HPU", "hpu", "HABANA_VISIBLE_MODULES", f"{_KEEP}HABANA_VISIBLE_MODULES"),
    _Accelerator("neuron_cores", "neuron", "NEURON_RT_VISIBLE_CORES", f"{_KEEP}NEURON_RT_VISIBLE_CORES"),
    _Accelerator("RBLN", "rbln", "RBLN_DEVICES", f"{_KEEP}RBLN_RT_VISIBLE_DEVICES"),
    _Accelerator("FURIOSA", "furiosa", "FURIOSA_DEVICES", f"{_KEEP}FURIOSA_DEVICES"),
)

#: Every variable that masks devices, and every flag that tells Ray to leave the mask alone.
VISIBILITY_VARIABLES = frozenset(row.visible for row in _ACCELERATORS) | {"ROCR_VISIBLE_DEVICES"}
KEEP_FLAGS = frozenset(row.keep_flag for row in _ACCELERATORS)


def accelerators_of(resources: Mapping[str, float]) -> tuple[str, ...]:
    """Which of a node's or bundle's resources are accelerators, in Ray's names: "GPU", "NPU", "TPU", ….

    Args:
        resources: Amounts by name, such as `NodeState.total` or `Bundle.resources`.
    """
    known = dict.fromkeys(row.resource for row in _ACCELERATORS)
    return tuple(name for name in known if resources.get(name))


def visible_devices(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that say which devices a process with it sees.

    A process that is given them before it uses devices has the same ones.
    """
    return {name: environ[name] for name in sorted(VISIBILITY_VARIABLES) if name in environ}


def bind_device(
    assigned: Mapping[str, Sequence[str]], environ: Mapping[str, str], inventory: Sequence[str] = ()
) -> DeviceBinding:
    """Decide which device a process uses and under which index it sees it.

    Ray masks a worker's devices unless a `RAY_EXPERIMENTAL_NOSET_*` flag forbids it. Without the flag the
    mask is what counts, so a mask that says anything but the assignment (a forwarded `CUDA_VISIBLE_DEVICES`,
    say) is corrected through `environment`. With the flag the process sees all devices and the local index is
    the place among them. A MIG instance is always masked: CUDA enumerates only the first one that it sees.

    Args:
        assigned: Resource name to ids, as `ray.get_runtime_context().get_accelerator_ids()` gives them.
        environ: Environment of the process.
        inventory: UUIDs of the node's devices in physical order, where known; gives UUIDs their index.

    Raises:
        ValueError: More than one kind of accelerator is assigned; one process binds one kind.
    """
    held = {resource: ids for resource, ids in assigned.items() if ids}
    if not held:
        return DeviceBinding("cpu")
    if len(held) > 1:
        raise ValueError(f"one process binds one kind of accelerator, but it was assigned {sorted(held)}")
    [(resource, unordered)] = held.items()
    row = _row(resource, unordered, environ)
    ids = _ordered([str(one) for one in unordered], _visible(row, environ) if row else None, inventory)
    index = _physical(ids[0], inventory)
    if row is None:
        return DeviceBinding(resource.lower(), index, index, device_ids=ids)
    local, environment = _local(row, ids, environ, inventory)
    return DeviceBinding(row.kind, index, local, environment, ids)


def _row(resource: str, ids: Sequence[str], environ: Mapping[str, str]) -> _Accelerator | None:
    rows = [row for row in _ACCELERATORS if row.resource == resource]
    if not rows:
        return None
    wanted = sorted(map(str, ids))
    tests: tuple[Callable[[_Accelerator], bool], ...] = (
        lambda row: sorted(_visible(row, environ) or ()) == wanted,
        lambda row: row.visible in environ,
        lambda row: _is_on(environ.get(row.keep_flag)) and not _is_on(environ.get(rows[-1].keep_flag)),
    )
    return next((row for test in tests for row in rows if test(row)), rows[-1])


def _is_on(flag: str | None) -> bool:
    return flag is not None and flag.lower() in ("1", "true")


def _visible(row: _Accelerator, environ: Mapping[str, str]) -> list[str] | None:
    value = environ.get(row.visible)
    if value is None:
        return None
    return [part.strip() for part in value.removeprefix(row.prefix).split(",") if part.strip()]


def _physical(device_id: str, inventory: Sequence[str]) -> int | None:
    if device_id.isdigit():
        return int(device_id)
    parent = device_id.removeprefix("MIG-").split("/")[0]
    return next((i for i, uuid in enumerate(inventory) if _is_prefix(parent, uuid)), None)


def _is_prefix(short: str, uuid: str) -> bool:
    """Whether `short` abbreviates `uuid`, as CUDA lets people write it."""
    return short.startswith("GPU-") and len(short) > len("GPU-") and uuid.startswith(short)


def _same(one: str, other: str, inventory: Sequence[str]) -> bool:
    if one == other or _is_prefix(one, other) or _is_prefix(other, one):
        return True
    if "MIG" in one + other:
        return False
    index = _physical(one, inventory)
    return index is not None and index == _physical(other, inventory)


def _ordered(ids: Sequence[str], visible: Sequence[str] | None, inventory: Sequence[str]) -> tuple[str, ...]:
    """Physical order where it is known, else the order of the mask; Ray's own order is that of a set."""

    def key(device_id: str) -> tuple[bool, int, int, str]:
        physical = _physical(device_id, inventory)
        places = [i for i, seen in enumerate(visible or ()) if seen == device_id]
        return (physical is None, physical or 0, places[0] if places else 0, device_id)

    return tuple(sorted(ids, key=key))


def _local(
    row: _Accelerator, ids: Sequence[str], environ: Mapping[str, str], inventory: Sequence[str]
) -> tuple[int | None, dict[str, str]]:
    visible = _visible(row, environ)
    places = [i for i, seen in enumerate(visible or ()) if _same(seen, ids[0], inventory)]
    unmasked = _is_on(environ.get(row.keep_flag)) and not ids[0].startswith("MIG-")
    if unmasked and visible is None:
        index = _physical(ids[0], inventory)
        if index is not None:
            return index, {}
    elif unmasked and places:
        return places[0], {}
    elif visible is not None and len(visible) == len(ids) and places:
        return places[0], _aligned(row, environ[row.visible], environ)
    mask = row.prefix + ",".join(ids)
    return 0, {row.visible: mask, **_aligned(row, mask, environ)}


def _aligned(row: _Accelerator, mask: str, environ: Mapping[str, str]) -> dict[str, str]:
    return {name: mask for name in row.aliases if environ.get(name, mask) != mask}
