"""What configuration files say: one after another, the local `env.yaml` last, and who said what."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ENV_FILE = "env.yaml"
ADDRESS = "ray_head_node_address"


@dataclass(slots=True)
class Layers:
    """Values by name, as the last one that said them has them.

    Attributes:
        values: The values; of mappings, each part is as the last one has it.
        origins: Who said each value last, such as a file's path.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def lay(self, values: Mapping[str, Any], origin: str) -> None:
        """Let one more say something."""
        for name, value in values.items():
            before = self.values.get(name)
            if isinstance(before, Mapping) and isinstance(value, Mapping):
                self.values[name] = {**before, **value}
            else:
                self.values[name] = value
            self.origins[name] = origin


def layers_of(
    paths: Iterable[str | os.PathLike[str]], env_file: str | os.PathLike[str] | None, section: str
) -> Layers:
    """Read files, each over the ones before, and what this folder or machine says in its `env.yaml` over all.

    Raises:
        OSError: A file can't be read; an `env.yaml` may be missing.
        ValueError: One is no YAML mapping.
    """
    layers = Layers()
    for path in paths:
        layers.lay(section_of(path, section), str(path))
    if env_file is not None and Path(env_file).exists():
        layers.lay(env_section_of(env_file, section), str(env_file))
    return layers


def section_of(path: str | os.PathLike[str], section: str) -> Mapping[str, Any]:
    """A section of a YAML file, or the whole of it where it has no such key.

    Raises:
        OSError: The file can't be read.
        ValueError: It is no YAML mapping.
    """
    content = _content(path)
    found = _section(content, section)
    return _mapping(content if found is None else found, path)


def env_section_of(path: str | os.PathLike[str], section: str) -> Mapping[str, Any]:
    """The same of an `env.yaml`, in which other programs have keys of their own, and secrets.

    Beside the section only `ray_head_node_address` is read at its top.

    Raises:
        OSError: The file can't be read.
        ValueError: It is no YAML mapping.
    """
    content = _mapping(_content(path), path)
    found = _section(content, section)
    top = {ADDRESS: content[ADDRESS]} if ADDRESS in content else {}
    return {**top, **_mapping({} if found is None else found, path)}


def _content(path: str | os.PathLike[str]) -> Any:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:  # What they say quotes the file: it has secrets.
        mark = getattr(error, "problem_mark", None)
        place = f": see line {mark.line + 1}" if mark else ", or not in UTF-8"
        raise ValueError(f"{path} is not YAML{place}") from None
    return {} if content is None else content


def _section(content: Any, section: str) -> Any:
    """What is under a key, dots going deeper; None where it is not there."""
    found = content
    for key in section.split("."):
        if not isinstance(found, Mapping) or key not in found:
            return None
        found = found[key]
    return {} if found is None else found


def _mapping(found: Any, path: str | os.PathLike[str]) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise ValueError(f"{path} holds {type(found).__name__}, not a mapping")
    return found
