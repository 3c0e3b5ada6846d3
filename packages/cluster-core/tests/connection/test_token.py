"""Where a token is kept, and what is said where it can't be."""

from pathlib import Path

import pytest

from raycrew.cluster_core import ClusterError
from raycrew.cluster_core._connection.token import child_authentication, protect_token, read_token
from raycrew.cluster_core.doctor import check_token_file

pytestmark = [pytest.mark.hostile, pytest.mark.smoke]


@pytest.fixture
def homeless(monkeypatch):
    def nobody_s():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody_s)


def test_without_a_home_the_error_says_what_to_set(homeless):
    for use in (protect_token, lambda environ: read_token({**environ, "RAY_AUTH_MODE": "token"})):
        with pytest.raises(ClusterError, match=r"no home directory.*set HOME.*RAY_AUTH_TOKEN_PATH"):
            use({})
    assert check_token_file({}).state == "doubtful"


def test_without_a_home_whoever_needs_none_goes_on(homeless):
    for environ in ({"RAY_AUTH_TOKEN": "ab"}, {"RAY_AUTH_TOKEN_PATH": "/a"}, {"RAY_AUTH_MODE": "disabled"}):
        protect_token(environ)
        assert child_authentication(environ) == environ
    assert child_authentication({}) == {} and read_token({}) is None


def test_a_home_that_can_t_be_written_is_named(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ClusterError, match=f"{file}.*Set HOME"):
        protect_token({}, file / ".ray" / "auth_token")


def test_a_new_token_is_the_user_s_alone(tmp_path):
    path = tmp_path / ".ray" / "auth_token"
    protect_token({}, path)
    assert path.stat().st_mode & 0o777 == 0o600 and len(path.read_text()) == 64
