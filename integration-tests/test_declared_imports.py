"""Every import of a package is declared by it."""

import ast
import functools
import importlib.metadata
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGES = Path(__file__).parent.parent / "packages"


def imported(source: Path) -> set[str]:
    """The modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
    return found


def declared(project: dict) -> set[str]:
    """The distributions that a project names, its extras' included, and itself."""
    optional = project.get("optional-dependencies", {}).values()
    requirements = [*project["dependencies"], *(r for extra in optional for r in extra)]
    return {canonicalize_name(Requirement(r).name) for r in requirements} | {project["name"]}


@functools.cache
def installed() -> Mapping[str, list[str]]:
    """The distributions that bring a module of this name at the top."""
    return importlib.metadata.packages_distributions()


def distributions(module: str) -> set[str]:
    """The distributions that bring a module; the namespace's portions are told apart by their second name."""
    top, _, rest = module.partition(".")
    if top == "raycrew":
        return {"raycrew-" + rest.split(".")[0].replace("_", "-")}
    return {canonicalize_name(d) for d in installed().get(top, [top])}


@pytest.mark.parametrize("package", sorted(p.parent.name for p in PACKAGES.glob("*/pyproject.toml")))
def test_every_import_is_declared(package):
    project = tomllib.loads((PACKAGES / package / "pyproject.toml").read_text())["project"]
    sources = sorted((PACKAGES / package / "src").rglob("*.py"))
    assert sources
    undeclared = {
        f"{source.name}: {module}"
        for source in sources
        for module in imported(source)
        if module.split(".")[0] not in sys.stdlib_module_names
        and not distributions(module) & declared(project)
        and f"/integrations/{module.split('.')[0]}/" not in str(source)  # runs only where that is
    }
    assert not undeclared


def test_an_undeclared_import_would_be_seen(tmp_path):
    (tmp_path / "module.py").write_text(
        "def f():\n    import torch.nn\n    from raycrew.venv_manager import x\n"
    )
    assert imported(tmp_path / "module.py") == {"torch.nn", "raycrew.venv_manager"}
    assert distributions("raycrew.venv_manager") == {"raycrew-venv-manager"}
    assert "torch" in distributions("torch.nn")
