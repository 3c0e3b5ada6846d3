"""From a spec to a recipe: uv chooses the versions, and local sources become wheels."""

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from raycrew.venv_manager import _spec
from raycrew.venv_manager._build import (
    Expectation,
    Luggage,
    Recipe,
    Sync,
    build_wheel,
    this_platform,
    wheel_of,
)
from raycrew.venv_manager._spec import (
    FILE_VARIABLES,
    EnvironmentSpec,
    absolute_requirement,
    base_of,
    counts,
    inline_metadata,
    is_package,
    local_sources,
    lock_file,
    project_folder,
    read_toml,
    requirement_files,
    requirement_lines,
    script_sources,
    settings,
    without_credentials,
)
from raycrew.venv_manager._store.flags import (
    chosen_names,
    export_flags,
    lock_flag,
    python_flags,
    refuse_conflicts,
)
from raycrew.venv_manager._uv import access_of, build_environment, run_uv, told_to_uv
from raycrew.venv_manager._waiting import result_of, scratch, workers


def resolve(
    spec: EnvironmentSpec,
    key: str,
    identity: Mapping[str, Any],
    carried: Luggage,
    *,
    environ: Mapping[str, str],
    on_line: Callable[[str], None] | None = None,
    timeout_s: float = 3600.0,
    checked: bool = False,
) -> Recipe:
    """Choose exact versions and build all local wheels.

    Args:
        spec: What to build.
        key: Its digest.
        identity: What the digest was taken of.
        carried: What the driver's environment gives along.
        environ: Environment of the calling process.
        on_line: Called with each line that uv writes.
        timeout_s: Deadline of each run of uv.
        checked: Another run of uv sees to it that the lock file fits the project, so this one need not.

    Raises:
        UvError: uv failed.
        SpecError: The spec does not fit what lies on the disk.
    """
    with scratch("raycrew-venv-resolve-") as folder:
        job = _Job(spec, folder, carried, environ, on_line, timeout_s, checked)
        packages = job.packages()
        wheels = dict(job.local_wheels)
    return Recipe(
        key=key,
        spec=spec.to_dict(),
        identity=identity,
        python=spec.python,
        lock=without_credentials(_spec.write_lock(packages)),
        wheels=wheels,
        settings=job.settings,
        variables=recipe_variables(spec, environ),
        platform=this_platform(),
        expectation=expectation(spec, carried),
        credentials=job.access.names,
        secrets=job.access.secrets,
    )


def recipe_variables(spec: EnvironmentSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of uv that count, the same on all nodes, and the spec's own; no credentials."""
    given = build_environment(spec, environ)
    declared = {name for name, _ in spec.environment}
    return {
        k: v
        for k, v in given.items()
        if k not in FILE_VARIABLES and (k in declared or (k.startswith("UV_") and counts(k)))
    }


def secrets_of(spec: EnvironmentSpec, environ: Mapping[str, str]) -> Mapping[str, str]:
    """The variables that give uv this process's credentials for a spec."""
    return access_of(spec, environ, told_to_uv(spec, environ)).secrets


def sync_of(spec: EnvironmentSpec, carried: Luggage, environ: Mapping[str, str]) -> Sync | None:
    """How uv installs a spec by itself: a locked project with no local sources, and nothing beside it."""
    carries = carried.ray or carried.distributions
    if spec.kind != "project" or carries or spec.packages or spec.requirement_files:
        return None
    if lock_file(spec) is None or local_sources(project_folder(spec)):
        return None
    words = ("sync", lock_flag(spec), *python_flags(spec), *export_flags(spec), "--project")
    told = told_to_uv(spec, environ)
    found = access_of(spec, environ, told)
    return Sync(
        (*words, str(project_folder(spec))),
        settings(told, spec, found.urls),
        build_environment(spec, environ) | dict(found.secrets),
    )


def expectation(spec: EnvironmentSpec, carried: Luggage) -> Expectation:
    """What the interpreter of an environment must be like."""
    if not spec.carry:
        return Expectation()
    names = [c.name for c in carried.distributions]
    return Expectation(
        python=(sys.version_info[0], sys.version_info[1]) if carried.ray else None,
        ray=carried.ray,
        versions={c.name: c.version for c in carried.distributions},
        imports=(
            *(("ray",) if carried.ray else ()),
            *(n.replace("-", ".", 1).replace("-", "_") for n in names),
        ),
    )


class _Job:
    """One resolution, in a temporary folder of its own."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        folder: Path,
        carried: Luggage,
        environ: Mapping[str, str],
        on_line: Callable[[str], None] | None,
        timeout_s: float,
        checked: bool,
    ) -> None:
        self.lock_flag = "--frozen" if checked else lock_flag(spec)
        self.spec, self.folder, self.carried = spec, folder, carried
        self.on_line, self.timeout_s = on_line, timeout_s
        self.project = project_folder(spec) if spec.kind == "project" else None
        self.told = told_to_uv(spec, environ)
        self.access = access_of(spec, environ, self.told)
        self.settings = settings(self.told, spec, self.access.urls)
        (folder / "uv.toml").write_text(self.settings, encoding="utf-8")
        own = {"UV_CONFIG_FILE": str(folder / "uv.toml"), "UV_NO_CONFIG": "1"}
        self.environ = {**build_environment(spec, environ), **self.access.secrets, **own}
        self.local_wheels: dict[str, bytes] = {}

    def packages(self) -> list[_spec.Package]:
        """All packages of the environment, each from an index, a URL or a wheel of ours."""
        self._gather_carried()
        if lock_file(self.spec) is None:
            return self._compile()
        locked = self._locked()
        return [*locked, *self._compile(onto=locked)]

    def _uv(self, *arguments: str | Path, cwd: Path | None = None) -> str:
        return run_uv(
            arguments,
            environ=self.environ,
            cwd=cwd or self.folder,
            on_line=self.on_line,
            timeout_s=self.timeout_s,
        )

    def _gather_carried(self) -> None:
        with workers(4) as pool:
            build = {k: v for k, v in self.environ.items() if k not in ("UV_CONFIG_FILE",)}
            made = [pool.submit(wheel_of, carried, build) for carried in self.carried.distributions]
            self.carried_wheels = dict(map(result_of, made))

    def _locked(self) -> list[_spec.Package]:
        """What the spec's own lock file says."""
        path = self.folder / "locked" / "pylock.toml"
        path.parent.mkdir()
        if self.spec.kind == "pylock":
            file = Path(self.spec.path)
            return self._settled(_spec.read_lock_file(file), file.parent)
        flags: list[str | Path] = [self.lock_flag, *export_flags(self.spec)]
        if self.project:
            flags += ["--project", self.project]
        else:
            flags += ["--script", self.spec.path]
        self._uv(
            "export",
            "-q",
            "--no-header",
            "--format",
            "pylock.toml",
            "-o",
            path,
            *python_flags(self.spec),
            *flags,
        )
        return self._settled(_spec.read_lock(path.read_text("utf-8")), path.parent)

    def _compile(self, onto: list[_spec.Package] | None = None) -> list[_spec.Package]:
        """What uv chooses for everything that no lock file decides; with `onto`, only what that lacks."""
        listed = list(self._requirements(onto))
        inputs: list[str | Path] = list(self.spec.requirement_files)
        if onto is None:
            inputs += self._inputs()
        if listed:
            path = self.folder / "requirements.in"
            path.write_text("\n".join(listed) + "\n", encoding="utf-8")
            inputs.append(path)
        if not inputs:
            return []
        output = self.folder / "compiled" / "pylock.toml"
        output.parent.mkdir()
        if self.carried.versions:
            output.write_text(_spec.preferred_versions(self.carried.versions), encoding="utf-8")
        if onto is not None:
            pins = self.folder / "pins.txt"
            pins.write_text("\n".join(p.pin for p in onto if p.pin) + "\n", encoding="utf-8")
            inputs += ["--constraints", pins]
        self._uv(
            "pip",
            "compile",
            "-q",
            "--no-header",
            "--format",
            "pylock.toml",
            "-o",
            output,
            *python_flags(self.spec),
            *inputs,
            cwd=base_of(self.spec) if self.spec.requirement_files else self.folder,
        )
        chosen = _spec.read_lock(output.read_text("utf-8"))
        if onto is not None:
            target = _spec.target_markers(self.spec.python)
            there = {p.name for p in onto if p.applies(target)}
            chosen = [p for p in chosen if p.name not in there]
        return self._settled(chosen, output.parent)

    def _inputs(self) -> list[str | Path]:
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
        declared = self.told.get("conflicts", [])
        refuse_conflicts(declared, {"extra": chosen_extras, "group": chosen_groups}, file)
        return flags

    def _requirements(self, onto: list[_spec.Package] | None) -> Iterator[str]:
        for text in self.spec.packages:
            yield absolute_requirement(text, Path.cwd())
        if onto is None and self.spec.kind == "script":
            for name, path in script_sources(Path(self.spec.path)).items():
                yield f"{name} @ {path.as_uri()}"
        if onto is None and self.project and not self.spec.only_groups:
            data = read_toml(self.project / "pyproject.toml")
            if is_package(data):
                yield f"{data['project']['name']} @ {self.project.as_uri()}"
        named = {p.name for p in onto} if onto is not None else self._named()
        for name, content in self.carried_wheels.items():
            path = self.folder / "carried" / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
            yield f"{canonicalize_name(name.split('-')[0])} @ {path.as_uri()}"
        if self.carried.ray and "ray" not in named:
            yield f"ray=={self.carried.ray}"

    def _named(self) -> set[str]:
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
        return {name for text in texts if (name := _name_of(text))}

    def _settled(self, packages: list[_spec.Package], base: Path) -> list[_spec.Package]:
        """The same packages, with local folders and files as wheels of ours."""
        return [self._settle(p, base) for p in packages]

    def _settle(self, package: _spec.Package, base: Path) -> _spec.Package:
        data = package.data
        if "directory" in data:
            folder = base / data["directory"]["path"] / data["directory"].get("subdirectory", "")
            build = {k: v for k, v in self.environ.items() if k != "UV_NO_CONFIG"}
            name, content = build_wheel(folder.resolve(), build, self.spec.python, timeout_s=self.timeout_s)
        elif "path" in data.get("archive", {}):
            path = (base / data["archive"]["path"]).resolve()
            if path.suffix != ".whl":
                return package
            name, content = path.name, path.read_bytes()
        else:
            return package
        self.local_wheels[name] = content
        return _spec.wheel_entry(name, content)


def _name_of(text: str) -> str | None:
    try:
        return str(canonicalize_name(Requirement(text.split(" #")[0].strip()).name))
    except InvalidRequirement:
        return None
