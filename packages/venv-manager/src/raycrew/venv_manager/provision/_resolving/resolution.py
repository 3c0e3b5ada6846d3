"""From a spec to a recipe: uv chooses the versions, and local sources become wheels."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from packaging.utils import canonicalize_name

from raycrew.venv_manager import _spec
from raycrew.venv_manager._spec import (
    FILE_VARIABLES,
    EnvironmentSpec,
    base_of,
    counts,
    local_sources,
    lock_file,
    names_local_sources,
    project_folder,
    settings,
)
from raycrew.venv_manager._store import Expectation, Luggage, Sync, wheel_of
from raycrew.venv_manager._uv import access_of, build_environment, run_uv, told_to_uv
from raycrew.venv_manager._waiting import result_of, scratch, workers
from raycrew.venv_manager.errors import ResolutionError, SpecError
from raycrew.venv_manager.provision._resolving.choices import Choice
from raycrew.venv_manager.provision._resolving.flags import export_flags, lock_flag, python_flags
from raycrew.venv_manager.provision._resolving.wanted import Wanted


def choose(
    spec: EnvironmentSpec,
    sources: Mapping[str, Path],
    carried: Luggage,
    *,
    environ: Mapping[str, str],
    on_line: Callable[[str], None] | None = None,
    timeout_s: float = 3600.0,
    checked: bool = False,
) -> Choice:
    """Choose exact versions; nothing but what is carried along is built for it.

    Args:
        spec: What to build.
        sources: Names to paths of the local sources that it asks for.
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
        return job.choice({path: name for name, path in sources.items()})


def recipe_variables(spec: EnvironmentSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of uv that count, the same on all nodes, and the spec's own; no credentials."""
    given = build_environment(spec, environ)
    declared = {name for name, _ in spec.environment}
    return {
        k: v
        for k, v in given.items()
        if k not in FILE_VARIABLES and (k in declared or (k.startswith("UV_") and counts(k)))
    }


def is_synced(spec: EnvironmentSpec, carried: Luggage) -> bool:
    """Whether uv installs a spec by itself: a locked project with no local sources, and nothing beside it."""
    carries = carried.ray or carried.distributions
    if spec.kind != "project" or carries or spec.packages or spec.requirement_files:
        return False
    lock = lock_file(spec)
    return lock is not None and not names_local_sources(lock) and not local_sources(project_folder(spec))


def sync_of(spec: EnvironmentSpec, environ: Mapping[str, str]) -> Sync:
    """How uv installs a locked project by itself."""
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


def told_in(folder: Path, spec: EnvironmentSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of uv for a spec, with what else uv is told in a file in a folder."""
    told = told_to_uv(spec, environ)
    access = access_of(spec, environ, told)
    (folder / "uv.toml").write_text(settings(told, spec, access.urls), encoding="utf-8")
    own = {"UV_CONFIG_FILE": str(folder / "uv.toml")}
    return {**build_environment(spec, environ), **access.secrets, **own}


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
        self.wanted = Wanted(spec, environ, told_to_uv(spec, environ).get("conflicts", []))
        self.environ = told_in(folder, spec, environ) | {"UV_NO_CONFIG": "1"}

    def choice(self, names: Mapping[Path, str]) -> Choice:
        """All packages of the environment, told apart by where they come from."""
        self._gather_carried()
        elsewhere, sources, carried = [], {}, []
        for package, base in self._packages():
            path = _local_path(package, base)
            if path is None:
                elsewhere.append(package)
            elif not package.applies(self._target):
                continue
            elif path.parent == self.folder / "carried":
                carried.append(package.name)
            else:
                sources[package.name] = _counted(package, path, names)
        return Choice.of(elsewhere, sources, carried)

    def _target(self) -> Mapping[str, str]:
        """Marker values of the interpreter that uv chooses, as it does for the build."""
        if self.spec.python is None:
            return {}
        if Path(self.spec.python).is_absolute():
            return _spec.markers_of(Path(self.spec.python))
        folder = self.folder / "target"
        if not folder.exists():
            self._uv("venv", "-q", "--no-project", *python_flags(self.spec), folder)
        return _spec.markers_of(folder)

    def _packages(self) -> list[tuple[_spec.Package, Path]]:
        """Entries of locks, each with the folder that its paths start from."""
        if lock_file(self.spec) is None:
            return self._compile()
        locked = self._locked()
        return [*locked, *self._compile([package for package, _ in locked])]

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

    def _locked(self) -> list[tuple[_spec.Package, Path]]:
        """What the spec's own lock file says."""
        path = self.folder / "locked" / "pylock.toml"
        path.parent.mkdir()
        if self.spec.kind == "pylock":
            file = Path(self.spec.path)
            return [(package, file.parent) for package in _spec.read_lock_file(file)]
        flags: list[str | Path] = [self.lock_flag, *export_flags(self.spec)]
        if self.wanted.project:
            flags += ["--project", self.wanted.project]
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
        return [(package, path.parent) for package in _spec.read_lock(path.read_text("utf-8"))]

    def _compile(self, onto: list[_spec.Package] | None = None) -> list[tuple[_spec.Package, Path]]:
        """What uv chooses for everything that no lock file decides; with `onto`, only what that lacks."""
        added = list(self._carried(onto))
        listed = [*self.wanted.requirements(onto), *added]
        inputs: list[str | Path] = list(self.spec.requirement_files)
        if onto is None:
            inputs += self.wanted.inputs()
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
        try:
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
        except ResolutionError as error:
            error.args = (f"{error}{_origin(added)}",)
            raise
        chosen = _spec.read_lock(output.read_text("utf-8"))
        if onto is not None:
            there = {p.name for p in onto if p.applies(self._target)}
            chosen = [p for p in chosen if p.name not in there]
        return [(package, output.parent) for package in chosen]

    def _carried(self, onto: list[_spec.Package] | None) -> Iterator[str]:
        named = {p.name for p in onto} if onto is not None else self.wanted.names()
        for name, content in self.carried_wheels.items():
            path = self.folder / "carried" / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
            yield f"{canonicalize_name(name.split('-')[0])} @ {path.as_uri()}"
        if self.carried.ray and "ray" not in named:
            yield f"ray=={self.carried.ray}"


def _origin(added: Sequence[str]) -> str:
    """Whose the requirements are that nobody wrote down."""
    if not added:
        return ""
    names = ", ".join(one.split(" @ ")[0] for one in added)
    return (
        f"\nOf what is required, raycrew added {names}: what this driver runs, which its workers need, too. "
        "carry=False leaves it out; a ray among the requirements takes the place of the driver's"
    )


def _counted(package: _spec.Package, path: Path, names: Mapping[Path, str]) -> str:
    """The name of a source among what is asked for: what counts in no key is not built.

    Raises:
        SpecError: It is not among that.
    """
    if path not in names:
        raise SpecError(
            f"{package.name} is built from {path}, which nothing that the environment is made from names: a "
            "change there would go unseen; lock the project anew (`uv lock`), or name it as a requirement"
        )
    return names[path]


def _local_path(package: _spec.Package, base: Path) -> Path | None:
    """The folder or file that an entry is built from, or None for one from elsewhere."""
    if package.local_path is None:
        return None
    return Path(base / package.local_path).resolve()
