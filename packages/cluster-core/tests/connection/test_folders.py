"""The folder of a session belongs to its user alone."""

import stat

from raycrew.cluster_core._connection.folders import keep_to_user


def test_nobody_else_gets_into_a_session_and_what_is_not_there_is_said(tmp_path, caplog):
    session = tmp_path / "session_1"
    session.mkdir()
    session.chmod(0o777)
    keep_to_user(str(session))
    assert stat.S_IMODE(session.stat().st_mode) == 0o700
    keep_to_user(None)
    assert caplog.text == ""
    keep_to_user(str(tmp_path / "absent"))
    assert "other users may look into" in caplog.text
