"""What an environment is, and the digest of everything that decides its content."""

from raycrew.venv_manager._spec.digest import (
    KEY_LENGTH,
    base_of,
    explain,
    identity,
    key_of,
    local_requirement,
    lock_file,
    project_folder,
    script_sources,
)
from raycrew.venv_manager._spec.locks import (
    Package,
    of_wheel,
    preferences,
    read,
    read_file,
    target,
    write,
)
from raycrew.venv_manager._spec.sources import (
    file_hash,
    folder_fingerprint,
    is_package,
    local_sources,
    read_toml,
    requirement_files,
    requirement_lines,
    workspace_root,
)
from raycrew.venv_manager._spec.spec import EnvironmentSpec
from raycrew.venv_manager._spec.uv_settings import inline_metadata, settings

__all__ = [
    "KEY_LENGTH",
    "EnvironmentSpec",
    "Package",
    "base_of",
    "explain",
    "file_hash",
    "folder_fingerprint",
    "identity",
    "inline_metadata",
    "is_package",
    "key_of",
    "local_requirement",
    "local_sources",
    "lock_file",
    "of_wheel",
    "preferences",
    "project_folder",
    "read",
    "read_file",
    "read_toml",
    "requirement_files",
    "requirement_lines",
    "script_sources",
    "settings",
    "target",
    "workspace_root",
    "write",
]
