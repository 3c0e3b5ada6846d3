"""A recipe: exact versions and all local wheels, so that a node builds without the project."""

import io
import json
import platform
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raycrew.venv_manager._store.building.probing import Expectation


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that a node needs in order to build an environment.

    Attributes:
        key: Digest that the environment is named by.
        spec: What it was made from, as `EnvironmentSpec.to_dict` gives it.
        identity: What the digest was taken of.
        python: Version or path of the interpreter; None for the one that runs the build.
        lock: A lock file (PEP 751) with exact versions.
        wheels: File names and contents of the wheels that the lock names as local ones.
        settings: A `uv.toml`.
        variables: The variables that tell uv where packages come from, and the spec's own.
        platform: System and machine that the versions were chosen for.
        expectation: What the interpreter must be like in the end.
        credentials: Name to URL of the indexes that ask for credentials, which a node must have of its own;
            and names of secret variables, to nothing.
        secrets: The variables with those of this process; they are neither kept nor sent.
    """

    key: str
    spec: Mapping[str, Any]
    identity: Mapping[str, Any]
    python: str | None
    lock: str
    wheels: Mapping[str, bytes]
    settings: str
    variables: Mapping[str, str]
    platform: str
    expectation: Expectation = field(default_factory=Expectation)
    credentials: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    def to_bytes(self) -> bytes:
        """A zip file: it is written and sent as one piece."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("pylock.toml", self.lock)
            archive.writestr("uv.toml", self.settings)
            for name, content in self.wheels.items():
                archive.writestr(f"wheels/{name}", content)
            rest = {
                "key": self.key,
                "spec": dict(self.spec),
                "identity": dict(self.identity),
                "python": self.python,
                "variables": dict(self.variables),
                "platform": self.platform,
                "expectation": self.expectation.to_list(),
                "credentials": dict(self.credentials),
            }
            archive.writestr("recipe.json", json.dumps(rest, indent=1))
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> "Recipe":
        """The inverse of `to_bytes`."""
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            rest = json.loads(archive.read("recipe.json"))
            expectation = Expectation.from_list(rest.pop("expectation"))
            return cls(
                **rest,
                lock=archive.read("pylock.toml").decode(),
                settings=archive.read("uv.toml").decode(),
                wheels={
                    name.removeprefix("wheels/"): archive.read(name)
                    for name in archive.namelist()
                    if name.startswith("wheels/")
                },
                expectation=expectation,
            )


def this_platform() -> str:
    """System and machine of this process, as a recipe names them."""
    return f"{sys.platform}-{platform.machine()}"
