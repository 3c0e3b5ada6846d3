"""What an environment is, and the digest of everything that decides its content."""

from raycrew.venv_manager._spec.cache_keys import declared, named_files
from raycrew.venv_manager._spec.checkout import files_of_git, ignored_by_git
from raycrew.venv_manager._spec.credentials import Credential, credentials_in, without_credentials
from raycrew.venv_manager._spec.digest import KEY_LENGTH, asked, choice_of, explain, identity, key_of
from raycrew.venv_manager._spec.fingerprints import (
    file_hash,
    files_below,
    folder_fingerprint,
    holds_files,
    ignored_fingerprint,
    is_litter,
)
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
from raycrew.venv_manager._spec.listed import (
    absolute_requirement,
    local_requirement,
    required_name,
    requirement_files,
    requirement_lines,
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
from raycrew.venv_manager._spec.sources import (
    build_sources,
    is_package,
    local_sources,
    read_toml,
    workspace_root,
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
    "Credential",
    "EnvironmentSpec",
    "Package",
    "absolute_requirement",
    "asked",
    "base_of",
    "build_sources",
    "choice_of",
    "counted_settings",
    "counts",
    "credentials_in",
    "declared",
    "explain",
    "extra_requirements",
    "file_hash",
    "files_below",
    "files_of_git",
    "fingerprint",
    "folder_fingerprint",
    "holds_files",
    "identity",
    "ignored_by_git",
    "ignored_fingerprint",
    "inline_metadata",
    "is_credential",
    "is_litter",
    "is_of_index",
    "is_package",
    "key_of",
    "label_of",
    "local_requirement",
    "local_sources",
    "lock_file",
    "locked_versions",
    "named_files",
    "names_local_sources",
    "preferred_versions",
    "project_folder",
    "project_hash",
    "read_lock",
    "read_lock_file",
    "read_toml",
    "required_name",
    "requirement_files",
    "requirement_lines",
    "script_sources",
    "settings",
    "source_paths",
    "target_markers",
    "wheel_entry",
    "with_absolute_paths",
    "without_credentials",
    "workspace_root",
    "write_lock",
]
