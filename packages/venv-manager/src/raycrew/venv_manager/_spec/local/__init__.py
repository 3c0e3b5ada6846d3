"""What is read on this machine: project and requirements files, local sources, and fingerprints of both."""

from raycrew.venv_manager._spec.local.cache_keys import declared, named_files
from raycrew.venv_manager._spec.local.checkout import files_of_git, ignored_by_git
from raycrew.venv_manager._spec.local.credentials import Credential, credentials_in, without_credentials
from raycrew.venv_manager._spec.local.fingerprints import (
    archive_hash,
    file_hash,
    files_below,
    folder_fingerprint,
    holds_files,
    ignored_fingerprint,
    is_litter,
    lock_hash,
    source_fingerprint,
)
from raycrew.venv_manager._spec.local.listed import (
    absolute_requirement,
    local_requirement,
    named_requirement,
    required_name,
    requirement_files,
    requirement_lines,
    statements_hash,
)
from raycrew.venv_manager._spec.local.sources import (
    build_sources,
    has_build_code,
    is_package,
    local_sources,
    member,
    read_toml,
    sources_named,
    with_theirs,
    workspace_root,
)

__all__ = [
    "Credential",
    "absolute_requirement",
    "archive_hash",
    "build_sources",
    "credentials_in",
    "declared",
    "file_hash",
    "files_below",
    "files_of_git",
    "folder_fingerprint",
    "has_build_code",
    "holds_files",
    "ignored_by_git",
    "ignored_fingerprint",
    "is_litter",
    "is_package",
    "local_requirement",
    "local_sources",
    "lock_hash",
    "member",
    "named_files",
    "named_requirement",
    "read_toml",
    "required_name",
    "requirement_files",
    "requirement_lines",
    "source_fingerprint",
    "sources_named",
    "statements_hash",
    "with_theirs",
    "without_credentials",
    "workspace_root",
]
