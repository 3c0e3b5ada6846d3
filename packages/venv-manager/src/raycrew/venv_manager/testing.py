"""For tests: a small package index, a uv that is slow or fails on demand, and nodes that are threads."""

import hashlib
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from packaging.utils import canonicalize_name

from raycrew.venv_manager._store import pack
from raycrew.venv_manager._uv import OLDEST

T = TypeVar("T")


def make_wheel(
    name: str,
    version: str,
    *,
    requires: Sequence[str] = (),
    extras: Mapping[str, Sequence[str]] | None = None,
    files: Mapping[str, str | bytes] | None = None,
) -> tuple[str, bytes]:
    """A pure-Python wheel, as file name and content; its module says `VERSION` unless `files` are given."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {text}" for text in requires]
    for extra, listed in (extras or {}).items():
        lines += [
            f"Provides-Extra: {extra}",
            *(f'Requires-Dist: {text} ; extra == "{extra}"' for text in listed),
        ]
    content = files or {f"{module}/__init__.py": f'VERSION = "{version}"\n'}
    rows = [
        (path, text.encode() if isinstance(text, str) else text) for path, text in sorted(content.items())
    ]
    rows.append((f"{info}/METADATA", ("\n".join(lines) + "\n").encode()))
    rows.append((f"{info}/WHEEL", b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"))
    return f"{module}-{version}-py3-none-any.whl", pack(rows, info)


def _link(wheel: Path) -> str:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return f'<a href="{wheel.name}#sha256={digest}">{wheel.name}</a>\n'


class LocalIndex:
    """A package index (PEP 503) in a folder: real uv resolves and installs from it without a network.

    Args:
        folder: Where its files go.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "simple"
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        """What uv takes as an index."""
        return self.folder.absolute().as_uri()

    def add(
        self,
        name: str,
        version: str,
        *,
        requires: Sequence[str] = (),
        extras: Mapping[str, Sequence[str]] | None = None,
        files: Mapping[str, str | bytes] | None = None,
    ) -> Path:
        """Publish a version; returns the path of its wheel."""
        file_name, content = make_wheel(name, version, requires=requires, extras=extras, files=files)
        folder = self.folder / canonicalize_name(name)
        folder.mkdir(exist_ok=True)
        (folder / file_name).write_bytes(content)
        links = "".join(_link(wheel) for wheel in sorted(folder.glob("*.whl")))
        (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>\n{links}</body></html>\n")
        return folder / file_name

    def environ(self, cache: Path, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """An environment in which uv knows only this index, and keeps its cache in a folder of its own."""
        inherited = os.environ if base is None else base
        kept = {k: v for k, v in inherited.items() if not k.startswith(("UV_", "PIP_", "RAYCREW_"))}
        return kept | {
            "PIP_CONFIG_FILE": os.devnull,
            "UV_CACHE_DIR": str(cache),
            "UV_COMPILE_BYTECODE": "0",
            "UV_DEFAULT_INDEX": self.url,
            "UV_PYTHON_DOWNLOADS": "never",
        }


def write_project(
    folder: Path,
    *,
    dependencies: Sequence[str] = (),
    extras: Mapping[str, Sequence[str]] | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
    name: str = "demo-project",
    more: str = "",
) -> Path:
    """Write the project file of a project without sources of its own; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        "[project]", f'name = "{name}"', 'version = "0"', 'requires-python = ">=3.11"',
        f"dependencies = {json.dumps(list(dependencies))}",
    ]  # fmt: skip
    for title, tables in (("project.optional-dependencies", extras), ("dependency-groups", groups)):
        if tables:
            lines += [f"[{title}]", *(f"{key} = {json.dumps(list(value))}" for key, value in tables.items())]
    (folder / "pyproject.toml").write_text("\n".join(lines) + "\n" + textwrap.dedent(more))
    return folder


_FAKE = """\
#!{python} -IS
import json, os, sys, time
here, words = {folder!r}, sys.argv[1:]
if words == ["--version"]:
    sys.exit(print("uv {version} (fake)"))
verb = " ".join(words[:2]) if words[0] == "pip" else words[0]
plan = json.load(open(os.path.join(here, "plan.json")))
with open(os.path.join(here, "calls"), "a") as log:
    log.write(json.dumps([os.getpid(), verb, words]) + "\\n")
def after(flag):
    return words[words.index(flag) + 1]
def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)
print("fake uv", verb, file=sys.stderr, flush=True)
def linger(name):
    time.sleep(plan["seconds"].get(name, 0))
    while os.path.exists(os.path.join(here, "hold " + name)):
        time.sleep(0.01)
linger(verb)
plan = json.load(open(os.path.join(here, "plan.json")))
if verb in plan["fails"]:
    print(plan["fails"][verb], file=sys.stderr)
    sys.exit(2)
def make_interpreter(root):
    write(os.path.join(root, "pyvenv.cfg"), "home = {home}\\n")
    os.makedirs(os.path.join(root, "bin"))
    os.symlink({python!r}, os.path.join(root, "bin", "python"))
def install(root):
    site = os.path.join(root, "lib", "python{minor}", "site-packages")
    for number in range(plan["files"]):
        write(os.path.join(site, "fake", f"part{{number}}.py"), "x = 1\\n")
        linger("file")
    write(os.path.join(site, "fake", "__init__.py"), "")
    write(os.path.join(site, "fake-1.dist-info", "METADATA"), "Name: fake\\nVersion: 1\\n")
if verb in ("pip compile", "export"):
    write(after("-o"), '[[packages]]\\nname = "fake"\\nversion = "1"\\n')
elif verb == "venv":
    make_interpreter(words[-1])
elif verb == "sync":
    make_interpreter(os.environ["UV_PROJECT_ENVIRONMENT"])
    install(os.environ["UV_PROJECT_ENVIRONMENT"])
elif verb == "pip install":
    install(os.path.dirname(os.path.dirname(after("--python"))))
"""


@dataclass
class FakeUv:
    """A program that does as uv does, in milliseconds, with delays and failures on demand.

    Its environments hold one package `fake` 1 of `files` modules. Put `environ` into the store's environment.

    Attributes:
        folder: Where the program, its plan and its log lie.
        files: Modules that each installation writes, one after the other.
    """

    folder: Path
    files: int = 3
    _plan: dict[str, Any] = field(default_factory=lambda: {"seconds": {}, "fails": {}}, init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        python = Path(sys.executable)
        text = _FAKE.format(
            python=str(python), folder=str(self.folder), home=str(Path(sys.base_prefix, "bin")),
            minor=".".join(map(str, sys.version_info[:2])), version=".".join(map(str, OLDEST)),
        )  # fmt: skip
        self.path.write_text(text)
        self.path.chmod(0o755)
        self._save()

    @property
    def path(self) -> Path:
        """The program."""
        return self.folder / "uv"

    @property
    def environ(self) -> dict[str, str]:
        """Variables that make it the uv that is used."""
        return {"RAYCREW_UV": str(self.path), "PIP_CONFIG_FILE": os.devnull}

    def slow(self, verb: str, seconds: float) -> None:
        """Make a command slow: `venv`, `pip compile`, `pip install`, `export`, `sync`, or each `file`."""
        self._plan["seconds"][verb] = seconds
        self._save()

    def hold(self, verb: str) -> None:
        """Let calls of one command (or each `file`, once it is written) wait until `release`."""
        (self.folder / f"hold {verb}").touch()

    def release(self, verb: str) -> None:
        """Let go on what `hold` holds."""
        (self.folder / f"hold {verb}").unlink(missing_ok=True)

    def fail(self, verb: str, text: str) -> None:
        """Make one command fail, with this as its last words; an empty text heals it."""
        self._plan["fails"].pop(verb, None)
        if text:
            self._plan["fails"][verb] = text
        self._save()

    def calls(self, verb: str | None = None) -> list[list[str]]:
        """Arguments of the calls so far, of one command or of all."""
        log = self.folder / "calls"
        rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return [words for _, called, words in rows if verb in (None, called)]

    def _save(self) -> None:
        fresh = self.folder / "plan.fresh"
        fresh.write_text(json.dumps(self._plan | {"files": self.files}))
        fresh.replace(self.folder / "plan.json")


class ThreadNodes:
    """A `NodeRunner` whose nodes are threads of this process.

    Args:
        names: The nodes' ids; append to `names` and a node has joined.
    """

    def __init__(self, names: Iterable[str] = ("node-a", "node-b")) -> None:
        self.names = list(names)

    def run_on_each_node(self, fn: Callable[[], T]) -> Iterator[tuple[str, T]]:
        """Run `fn` once for each node; yield (node id, result) as they finish."""
        with ThreadPoolExecutor(max(1, len(self.names))) as pool:
            running = {pool.submit(fn): name for name in self.names}
            for done in as_completed(running):
                yield running[done], done.result()
