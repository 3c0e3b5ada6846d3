"""Whether an engine fits the torch and the Ray of its environment, by what packages say of themselves."""

from collections.abc import Iterator, Mapping

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

Needs = Mapping[str, tuple[str, tuple[str, ...]]]
"""Distribution -> (its version, what it requires of torch and of Ray, as its metadata says)."""


def engine_misfits(needs: Needs, versions: Mapping[str, str], driver_ray: str | None) -> list[str]:
    """What to change about each engine whose torch or Ray can't work; nothing is imported for it.

    Args:
        needs: Of distributions of vLLM, and of raycrew's that use torch.
        versions: Of torch and Ray in the environment.
        driver_ray: Version of the driver's Ray, which workers have to have, too; None where it has none.
    """
    return [
        line for name, needed in sorted(needs.items()) for line in _of(name, *needed, versions, driver_ray)
    ]


def _of(
    name: str, version: str, needed: tuple[str, ...], versions: Mapping[str, str], driver_ray: str | None
) -> Iterator[str]:
    for requirement in _applying(needed):
        library = canonicalize_name(requirement.name)
        has = driver_ray if library == "ray" and driver_ray else versions.get(library)
        wanted = f"{library}{requirement.specifier}"
        if has is None or _meets(requirement, has):
            continue
        if library == "ray" and driver_ray:
            yield (
                f"its {name} {version} needs {wanted}, the driver has ray {has}: pin another {name} "
                f"there, or install {wanted} for the driver and there"
            )
        else:
            yield (
                f"its {name} {version} needs {wanted}, and {library} {has} is there: ask for `{wanted}`, "
                f"or for a {name} that is made for {library} {has}"
            )


def _applying(needed: tuple[str, ...]) -> Iterator[Requirement]:
    """What counts on this platform; what can't be read says nothing."""
    for text in needed:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _meets(requirement: Requirement, version: str) -> bool:
    try:
        return requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True
