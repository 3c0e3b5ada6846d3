"""What an environment is, and the digest of everything that decides its content."""

from raycrew.venv_manager._spec.credentials import Credential, credentials_in, without_credentials
from raycrew.venv_manager._spec.digest import (
    KEY_LENGTH,
    base_of,
    explain,
    identity,
    key_of,
    lock_file,
    project_folder,
    script_sources,
)
from raycrew.venv_manager._spec.fingerprints import file_hash, folder_fingerprint
from raycrew.venv_manager._spec.listed import (
    absolute_requirement,
    local_requirement,
    requirement_files,
    requirement_lines,
)
from raycrew.venv_manager._spec.locks import (
    Package,
    locked_versions,
    preferred_versions,
    read_lock,
    read_lock_file,
    target_markers,
    wheel_entry,
    write_lock,
)
from raycrew.venv_manager._spec.sources import is_package, local_sources, read_toml, workspace_root
from raycrew.venv_manager._spec.spec import EnvironmentSpec
from raycrew.venv_manager._spec.uv_settings import (
    counted_settings,
    inline_metadata,
    settings,
    with_absolute_paths,
)
from raycrew.venv_manager._spec.variables import FILE_VARIABLES, counts, is_credential

__all__ = [
    "FILE_VARIABLES",
    "KEY_LENGTH",
    "Credential",
    "EnvironmentSpec",
    "Package",
    "absolute_requirement",
    "base_of",
    "counted_settings",
    "counts",
    "credentials_in",
    "explain",
    "file_hash",
    "folder_fingerprint",
    "identity",
    "inline_metadata",
    "is_credential",
    "is_package",
    "key_of",
    "local_requirement",
    "local_sources",
    "lock_file",
    "locked_versions",
    "preferred_versions",
    "project_folder",
    "read_lock",
    "read_lock_file",
    "read_toml",
    "requirement_files",
    "requirement_lines",
    "script_sources",
    "settings",
    "target_markers",
    "wheel_entry",
    "with_absolute_paths",
    "without_credentials",
    "workspace_root",
    "write_lock",
]
