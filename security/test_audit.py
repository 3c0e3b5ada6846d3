"""An audit that could look nothing up does not pass for one that found nothing."""

import subprocess
from types import SimpleNamespace

import audit
import pytest

SKIPPED = '{"name": "rich", "skip_reason": "not found"}, {"name": "raycrew-cluster-core", "skip_reason": "x"}'
CLEAN = '{"name": "psutil", "version": "7.0", "vulns": []}'
ADVISORY = '{"id": "GHSA-1", "aliases": ["CVE-1"], "fix_versions": ["3.1"]}'
BAD = f'{{"name": "aiohttp", "version": "3.0", "vulns": [{ADVISORY}]}}'


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        (SKIPPED, 3, "0 dependencies looked up, 1 not"),
        (f"{SKIPPED}, {CLEAN}", 0, "1 dependencies looked up, 1 not"),
        (f"{CLEAN}, {BAD}", 1, "aiohttp 3.0: GHSA-1, mended in 3.1"),
    ],
)
def test_what_it_comes_to(found, code, said, monkeypatch, capsys):
    done = SimpleNamespace(stdout=f'{{"dependencies": [{found}]}}', stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_args, **_options: done)
    assert audit.main() == code
    assert said in capsys.readouterr().out


def test_what_was_read_is_no_matter_and_what_is_no_report_is_an_error(monkeypatch):
    monkeypatch.setattr(audit, "KNOWN", {"CVE-1": "only its server is hit, which nothing here starts"})
    done = SimpleNamespace(stdout=f'{{"dependencies": [{BAD}]}}', stderr="no service")
    monkeypatch.setattr(subprocess, "run", lambda *_args, **_options: done)
    assert audit.main() == 0
    done.stdout = ""
    assert audit.main() == 2
