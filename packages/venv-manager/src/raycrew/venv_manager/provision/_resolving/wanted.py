"""What uv is asked to choose versions for: files with their extras and groups, and requirements."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from raycrew.venv_manager._spec import (
    EnvironmentSpec,
    Package,
    absolute_requirement,
    inline_metadata,
    is_package,
    project_folder,
    read_toml,
    required_name,
    requirement_files,
    requirement_lines,
    script_sources,
)
from raycrew.venv_manager.provision._resolving.flags import chosen_names, refuse_conflicts


class Wanted:
    """What a spec asks for.

    Args:
        spec: The spec.
        environ: The environment that uv runs in.
        conflicts: The extras and groups that the project declares as conflicting.
    """

    def __init__(
        self, spec: EnvironmentSpec, environ: Mapping[str, str], conflicts: list[list[dict[str, Any]]]
    ) -> None:
        self.spec, self.environ, self.conflicts = spec, environ, conflicts
        self.project = project_folder(spec) if spec.kind == "project" else None

    def inputs(self) -> list[str | Path]:
        """Files, with the extras and groups that are chosen of them.

        Raises:
            ResolutionError: An extra or a group is not defined.
            ConflictingExtrasError: Some contradict each other.
        """
        spec = self.spec
        if spec.kind == "script":
            return [Path(spec.path)]
        if not self.project:
            return []
        file = self.project / "pyproject.toml"
        data = read_toml(file)
        flags: list[str | Path] = [] if spec.only_groups else [file]
        extras = data.get("project", {}).get("optional-dependencies", {})
        chosen_extras = chosen_names("extra", spec.extras, spec.no_extras, extras, (), file)
        for name in chosen_extras:
            flags += ["--extra", name]
        groups = data.get("dependency-groups", {})
        by_default = (
            data.get("tool", {}).get("uv", {}).get("default-groups", ["dev"] if "dev" in groups else [])
        )
        by_default = list(groups) if by_default == "all" else by_default
        use_default = spec.default_groups and not spec.only_groups
        chosen_groups = chosen_names(
            "group", spec.groups, spec.no_groups, groups, by_default if use_default else (), file
        )
        for name in chosen_groups:
            flags += ["--group", f"{file}:{name}"]
        refuse_conflicts(self.conflicts, {"extra": chosen_extras, "group": chosen_groups}, file)
        return flags

    def requirements(self, onto: Sequence[Package] | None) -> Iterator[str]:
        """Requirements beside the files; with `onto`, beside a lock that has the others."""
        for text in self.spec.packages:
            yield absolute_requirement(text, Path.cwd())
        if onto is not None:
            return
        if self.spec.kind == "script":
            for name, path, marker in script_sources(Path(self.spec.path)):
                yield f"{name} @ {path.as_uri()}" + (f" ; {marker}" if marker else "")
        if self.project and not self.spec.only_groups:
            data = read_toml(self.project / "pyproject.toml")
            if is_package(data):
                yield f"{data['project']['name']} @ {self.project.as_uri()}"

    def names(self) -> set[str]:
        """The packages that the spec itself asks for."""
        texts = list(self.spec.packages)
        for listed in self.spec.requirement_files:
            for file in requirement_files(Path(listed), self.environ, constraints=False):
                texts += requirement_lines(file, self.environ)
        if self.spec.kind == "script":
            texts += inline_metadata(Path(self.spec.path)).get("dependencies", [])
        if self.project:
            data = read_toml(self.project / "pyproject.toml")
            project = data.get("project", {})
            texts += project.get("dependencies", [])
            for listed in (
                *project.get("optional-dependencies", {}).values(),
                *data.get("dependency-groups", {}).values(),
            ):
                texts += [text for text in listed if isinstance(text, str)]
        return {name for text in texts if (name := required_name(text))}
