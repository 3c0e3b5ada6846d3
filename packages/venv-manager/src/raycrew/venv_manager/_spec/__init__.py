"""What an environment is, and the digest of everything that decides its content."""

from raycrew.venv_manager._spec.digest import KEY_LENGTH, asked, choice_of, explain, identity, key_of
from raycrew.venv_manager._spec.given import (
    base_of,
    fingerprint,
    label_of,
    lock_file,
    project_folder,
    project_hash,
    script_sources,
    source_paths,
)
from raycrew.venv_manager._spec.locks import (
    Package,
    locked_versions,
    names_local_sources,
    preferred_versions,
    read_lock,
    read_lock_file,
    target_markers,
    wheel_entry,
    write_lock,
)
from raycrew.venv_manager._spec.spec import EnvironmentSpec
from raycrew.venv_manager._spec.uv_settings import (
    OF_PROJECTS,
    counted_settings,
    extra_requirements,
    inline_metadata,
    settings,
    with_absolute_paths,
)
from raycrew.venv_manager._spec.variables import FILE_VARIABLES, counts, is_credential, is_of_index

__all__ = [
    "FILE_VARIABLES",
    "KEY_LENGTH",
    "OF_PROJECTS",
    "EnvironmentSpec",
    "Package",
    "asked",
    "base_of",
    "choice_of",
    "counted_settings",
    "counts",
    "explain",
    "extra_requirements",
    "fingerprint",
    "identity",
    "inline_metadata",
    "is_credential",
    "is_of_index",
    "key_of",
    "label_of",
    "lock_file",
    "locked_versions",
    "names_local_sources",
    "preferred_versions",
    "project_folder",
    "project_hash",
    "read_lock",
    "read_lock_file",
    "script_sources",
    "settings",
    "source_paths",
    "target_markers",
    "wheel_entry",
    "with_absolute_paths",
    "write_lock",
]
