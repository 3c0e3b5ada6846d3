"""The configuration of a cluster: by keyword, from a YAML file, and by dotted overrides."""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

import yaml

from raycrew.cluster_core._connection.files import ENV_FILE, layers_of, section_of


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """What `init_ray` and `RayVirtualCluster` are given, in one value.

    What only code can say is not in it: `bundle_specs` and `node_order` are given beside it.

    Attributes:
        ray_head_node_address: Cluster to join: `host:port`, `ray://host:port`, "auto" or "local".
        num_nodes: Logical nodes.
        gpus_per_node: Bundles of each node, one device each; one CPU each where `use_gpus` is false.
        bundle_ct_per_node_list: Bundles node by node, in place of the two above.
        use_gpus: Whether bundles hold a device.
        accelerator: Ray's name of the resource that is meant by a device.
        gpu_ids: Physical devices: a list, a list per node, or "auto".
        max_colocated_worker_groups: Worker groups that can share a bundle.
        enable_colocation: Two of them, unless `max_colocated_worker_groups` says more.
        placement_group_strategy: How the bundles of one node lie.
        unified: One placement group for all nodes.
        cpus_per_bundle: CPUs of each bundle; one per worker group by default.
        segment_size: Logical nodes that share an NVLink domain.
        label_selector: Labels that nodes must have.
        topology_strategy: A label whose value all nodes share, as in `{"zone": "STRICT_PACK"}`.
        name: Readable name of the virtual cluster.
        port_range: First and last port that are leased.
        timeout_s: Deadline of the allocation, in seconds.
        max_retries: How often placement groups are created anew.
        monitor_memory: Whether the memory of the bundles is watched.
        communication_backend: What workers are told to communicate with.
        namespace: Namespace of named actors.
        num_cpus: CPUs of a cluster that is started here, and so the next five.
        num_gpus: Its GPUs.
        resources: Its other resources.
        object_store_memory: Size of its object store, in bytes.
        temp_dir: Its folder for sessions.
        dashboard: Whether it has a dashboard, or the interface of that.
        log_dir: Folder for a link to its logs.
        forward_env: Names and patterns to forward besides the default ones.
        secrets: Names of variables that are handed to workers apart from the runtime environment.
    """

    ray_head_node_address: str | None = None
    num_nodes: int = 1
    gpus_per_node: int = 8
    bundle_ct_per_node_list: tuple[int, ...] | None = None
    use_gpus: bool = True
    accelerator: str = "GPU"
    gpu_ids: str | tuple[int, ...] | tuple[tuple[int, ...], ...] | None = None
    max_colocated_worker_groups: int = 1
    enable_colocation: bool = False
    placement_group_strategy: str = "STRICT_PACK"
    unified: bool = False
    cpus_per_bundle: float | None = None
    segment_size: int | None = None
    label_selector: Mapping[str, str] = field(default_factory=dict)
    topology_strategy: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    port_range: tuple[int, int] | None = None
    timeout_s: float = 180.0
    max_retries: int | None = None
    monitor_memory: bool = False
    communication_backend: str = "auto"
    namespace: str | None = None
    num_cpus: int | None = None
    num_gpus: int | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    object_store_memory: int | None = None
    temp_dir: str | None = None
    dashboard: bool | str | None = None
    log_dir: str | None = None
    forward_env: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, kind in _kinds().items():
            value = getattr(self, name)
            accepted = _accepted(value, kind)
            if accepted is _NOTHING:
                said = type(value).__name__ if name == "secrets" else repr(value)
                raise TypeError(f"{name} is {_shown(kind)}, not {said}")
            object.__setattr__(self, name, accepted)
        for name, least in (("num_nodes", 1), ("gpus_per_node", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} {getattr(self, name)} is below {least}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build from a mapping, such as a section of a bigger configuration.

        Raises:
            ValueError: A key is unknown, or a value out of bounds.
            TypeError: A value has the wrong type.
        """
        _check_names(values)
        return cls(**values)

    @classmethod
    def from_file(
        cls, path: str | os.PathLike[str], overrides: Iterable[str] = (), section: str = "cluster"
    ) -> Self:
        """Read a YAML file: its `section`, or the whole of it where it has no such key.

        Args:
            path: The file.
            overrides: As of `with_overrides`; each may begin with the section's name.
            section: Key under which the values are; dots go deeper.

        Raises:
            OSError: The file can't be read.
            ValueError: It is no YAML mapping, a key is unknown, or a value out of bounds.
            TypeError: A value has the wrong type.
        """
        return cls.from_mapping(section_of(path, section)).with_overrides(overrides, section)

    @classmethod
    def from_files(
        cls,
        paths: Iterable[str | os.PathLike[str]] = (),
        overrides: Iterable[str] = (),
        section: str = "cluster",
        env_file: str | os.PathLike[str] | None = ENV_FILE,
    ) -> Self:
        """Read YAML files, then `env.yaml`, then overrides: each goes over the ones before.

        An `env.yaml` is what this folder or machine has that others don't, kept out of version control: as
        programs of several kinds keep their keys and secrets in it, only its `section` and, at its top,
        `ray_head_node_address` are read. Mappings, such as `resources`, are merged part by part. What is said
        in no file comes from the environment (`RAY_ADDRESS`); see `init_ray`.

        Args:
            paths: Files that are there, each as for `from_file`.
            overrides: As of `with_overrides`, such as `sys.argv[1:]`.
            section: Key under which the values are; dots go deeper.
            env_file: Read if it is there; None reads none.

        Raises:
            OSError: A file can't be read.
            ValueError: A file is no YAML mapping, a key is unknown, or a value out of bounds.
            TypeError: A value has the wrong type.
        """
        layers = layers_of(paths, env_file, section)
        return cls.from_mapping(layers.values).with_overrides(overrides, section)

    def with_overrides(self, overrides: Iterable[str], section: str = "cluster") -> Self:
        """Apply overrides: `gpus_per_node=4`, `cluster.port_range=[20000,20100]`, `label_selector.zone=a`.

        Values are YAML. Overrides of other sections' names are refused: hand over only what is meant here.

        Raises:
            ValueError: An override is not NAME=VALUE, its name is unknown, or its value out of bounds.
            TypeError: Its value has the wrong type.
        """
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        for override in overrides:
            path, equals, text = override.partition("=")
            name, _, rest = path.strip().removeprefix(f"{section}.").partition(".")
            if not equals or not name:
                raise ValueError(f"override {override!r} is not NAME=VALUE")
            _check_names([name])
            value = _parsed(name, text)
            if rest:
                if not isinstance(values[name], Mapping):
                    raise ValueError(f"override {override!r}: {name} has no parts")
                value = {**values[name], rest: value}
            values[name] = value
        return type(self)(**values)

    @property
    def bundle_counts(self) -> list[int]:
        """Bundles of each logical node."""
        if self.bundle_ct_per_node_list is not None:
            return list(self.bundle_ct_per_node_list)
        return [self.gpus_per_node] * self.num_nodes

    def connection_options(self) -> dict[str, Any]:
        """Arguments for `init_ray`: only those that are set."""
        names = (
            *("namespace", "num_cpus", "num_gpus", "resources", "object_store_memory", "temp_dir"),
            *("dashboard", "log_dir", "forward_env", "secrets"),
        )
        options = {name: getattr(self, name) for name in names}
        options["address"] = self.ray_head_node_address
        return {name: value for name, value in options.items() if value not in (None, (), {})}

    def cluster_options(self) -> dict[str, Any]:
        """Arguments for `RayVirtualCluster`, as in `RayVirtualCluster(**config.cluster_options())`."""
        names = (
            *("use_gpus", "accelerator", "gpu_ids", "max_colocated_worker_groups", "enable_colocation"),
            *("placement_group_strategy", "unified", "cpus_per_bundle", "segment_size", "name", "port_range"),
            *("timeout_s", "max_retries", "monitor_memory", "communication_backend"),
        )
        options = {name: getattr(self, name) for name in names}
        counts = self.bundle_counts
        options |= {
            "bundle_ct_per_node_list": counts,
            "num_gpus_per_node": max(self.gpus_per_node, *counts, 1),
        }
        for name in ("label_selector", "topology_strategy"):
            options[name] = dict(getattr(self, name)) or None
        return options


_NOTHING = object()


def _kinds() -> dict[str, Any]:
    return get_type_hints(ClusterConfig)


def _check_names(names: Iterable[str]) -> None:
    known = list(_kinds())
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown configuration {unknown}; there are {', '.join(known)}")


def _parsed(name: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:  # What it says quotes the value, which may be a secret.
        raise ValueError(f"the override of {name} has a value that is not YAML") from None


def _accepted(value: Any, kind: Any) -> Any:
    """The value as a field of this kind holds it, or `_NOTHING`."""
    if isinstance(kind, UnionType):
        fits = (_accepted(value, one) for one in get_args(kind))
        return next((one for one in fits if one is not _NOTHING), _NOTHING)
    if kind is NoneType:
        return None if value is None else _NOTHING
    if get_origin(kind) is tuple:
        return _accepted_tuple(value, get_args(kind))
    if get_origin(kind) is Mapping:
        return _accepted_mapping(value, get_args(kind))
    if isinstance(value, bool) and kind is not bool:
        return _NOTHING
    if kind is float and isinstance(value, int):
        return float(value)
    return value if isinstance(value, kind) else _NOTHING


def _accepted_tuple(value: Any, kinds: tuple[Any, ...]) -> Any:
    if not isinstance(value, (list, tuple)):
        return _NOTHING
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    parts = [_accepted(one, kind) for one, kind in zip(value, kinds, strict=False)]
    return tuple(parts) if len(value) == len(kinds) and _NOTHING not in parts else _NOTHING


def _accepted_mapping(value: Any, kinds: tuple[Any, ...]) -> Any:
    if not isinstance(value, Mapping):
        return _NOTHING
    parts = {_accepted(key, kinds[0]): _accepted(one, kinds[1]) for key, one in value.items()}
    return _NOTHING if _NOTHING in (*parts, *parts.values()) else parts


def _shown(kind: Any) -> str:
    return (
        kind.__name__
        if isinstance(kind, type) and not get_args(kind)
        else str(kind).replace("NoneType", "None")
    )
