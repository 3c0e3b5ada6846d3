"""Credentials of indexes: they reach uv, and nothing else."""

import base64
import functools
import http.server
import json
import os
import threading

import pytest

from raycrew.venv_manager import (
    CredentialsError,
    EnvironmentSpec,
    Store,
    VenvError,
    ensure,
    identify,
    parse,
)
from raycrew.venv_manager.__main__ import main
from raycrew.venv_manager._spec.local.credentials import credentials_in, without_credentials
from raycrew.venv_manager._store.building import Recipe
from raycrew.venv_manager._uv import access_of
from raycrew.venv_manager._uv.access import hiding
from raycrew.venv_manager.provision import prepare
from raycrew.venv_manager.testing import LocalIndex, write_project

PASSWORD = "pa@ss:wörd"
QUOTED = "pa%40ss%3Aw%C3%B6rd"


class Guarded(http.server.SimpleHTTPRequestHandler):
    expected = tuple(
        "Basic " + base64.b64encode(user.encode()).decode() for user in (f"me:{PASSWORD}", "token:")
    )

    def do_GET(self):
        if self.headers.get("Authorization") in self.expected:
            super().do_GET()
            return
        self.send_response(401)
        self.send_header("WWW-Authenticate", "Basic")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """Host and port of an index that asks for a password; it has `secret` 1.0."""
    index = LocalIndex(tmp_path_factory.mktemp("guarded"))
    index.add("secret", "1.0")
    handler = functools.partial(Guarded, directory=str(index.folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def nowhere(environ, tmp_path):
    """An environment that knows no index, and whose user keeps no credentials."""
    kept = {k: v for k, v in environ.items() if k not in ("UV_DEFAULT_INDEX", "NETRC")}
    return kept | {
        "HOME": str(tmp_path / "home"),
        "UV_HTTP_RETRIES": "0",
        "UV_CACHE_DIR": str(tmp_path / "c"),
    }


def of_spec(tmp_path, url):
    return EnvironmentSpec.requirements(["secret"], default_index=url, carry=False), {}


def of_flag(tmp_path, url):
    return parse(f"uv run --no-project --with secret --index {url}").replace(carry=False), {}


def of_variable(tmp_path, url):
    return EnvironmentSpec.requirements(["secret"], carry=False), {"UV_INDEX": f"corp={url}"}


def of_pip(tmp_path, url):
    (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = {url}\n")
    return of_variable(tmp_path, url)[0], {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf")}


def of_direct_url(tmp_path, url):
    text = f"secret @ {url}/secret/secret-1.0-py3-none-any.whl"
    return EnvironmentSpec.requirements([text], carry=False), {}


def of_requirements_file(tmp_path, url):
    (tmp_path / "all.txt").write_text(f"--index-url {url}\nsecret\n")
    return EnvironmentSpec.requirements(tmp_path / "all.txt", carry=False), {}


def of_project(tmp_path, url):
    more = f'[[tool.uv.index]]\nname = "corp"\nurl = "{url}"\ndefault = true\n'
    return EnvironmentSpec.project(
        write_project(tmp_path / "p", dependencies=["secret"], more=more), carry=False
    ), {}


def of_find_links(tmp_path, url):
    return EnvironmentSpec.requirements(["secret"], find_links=[f"{url}/secret/"], carry=False), {
        "UV_DEFAULT_INDEX": LocalIndex(tmp_path / "empty").url
    }


def of_user(tmp_path, url):
    folder = tmp_path / "config" / "uv"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "uv.toml").write_text(f'[[index]]\nurl = "{url}"\ndefault = true\n')
    return EnvironmentSpec.requirements(["secret"], carry=False), {
        "XDG_CONFIG_HOME": str(tmp_path / "config")
    }


ORIGINS = [
    of_user,
    of_spec, of_flag, of_variable, of_pip, of_direct_url, of_requirements_file, of_project, of_find_links,
]  # fmt: skip


@pytest.mark.hostile
@pytest.mark.parametrize("origin", ORIGINS)
def test_a_password_reaches_uv_and_no_file(origin, tmp_path, guarded, nowhere, capsys):
    spec, more = origin(tmp_path, f"http://me:{QUOTED}@{guarded}")
    store = Store(tmp_path / "store", environ=nowhere | more)
    built = ensure(spec, store=store)
    assert built.stamp["packages"] == {"secret": "1.0"}
    store.remove_folder(built.path)
    assert ensure(spec, store=store) == store.look(built.key)  # from the recipe that was kept
    recipe = Recipe.from_bytes((store.root / "recipes" / f"{built.key}.zip").read_bytes())
    files = [p for p in store.root.rglob("*") if p.is_file() and not p.is_symlink()]
    assert main(["list", "--json", "--store", str(store.root)]) == 0
    assert main(["list", "--store", str(store.root)]) == 0
    shown = [str(spec), repr(spec), json.dumps(spec.to_dict()), str(recipe), capsys.readouterr().out]
    for text in (*shown, *(p.read_text(errors="replace") for p in files)):
        for secret in (PASSWORD, QUOTED, "me:pa"):
            assert secret not in text


def texts_of(error):
    """All that somebody may see of an error."""
    while error is not None:
        yield from (str(error), repr(error), *getattr(error, "__notes__", ()), getattr(error, "tail", ""))
        error = error.__cause__ or error.__context__


@pytest.mark.hostile
@pytest.mark.parametrize("origin", ORIGINS)
def test_a_refused_password_is_in_no_error(origin, tmp_path, guarded, nowhere, caplog):
    caplog.set_level("DEBUG")
    spec, more = origin(tmp_path, f"http://me:wr%40ng%3Aword@{guarded}")
    with pytest.raises(VenvError) as caught:
        ensure(spec, store=Store(tmp_path / "store", environ=nowhere | more))
    for text in (*texts_of(caught.value), caplog.text):
        assert "wr@ng" not in text and "wr%40ng" not in text


TELLING = """
import os, sys
def build_wheel(*_, **__):
    print(os.environ, *os.environ.values())
    raise SystemExit(" ".join(os.environ.values()))
"""


@pytest.mark.hostile
def test_a_build_that_prints_its_environment_tells_no_password(tmp_path, guarded, nowhere, caplog):
    caplog.set_level("DEBUG")
    bad = tmp_path / "bad"
    bad.mkdir()
    system = 'requires = []\nbuild-backend = "bad"\nbackend-path = ["."]\n'
    (bad / "pyproject.toml").write_text(f'[project]\nname = "bad"\nversion = "1"\n[build-system]\n{system}')
    (bad / "bad.py").write_text(TELLING)
    url = f"http://me:{QUOTED}@{guarded}"
    spec = EnvironmentSpec.requirements([str(bad)], default_index=url, carry=False)
    store = Store(tmp_path / "store", environ=nowhere | {"MY_API_KEY": "a k3y of mine alone"})
    with pytest.raises(VenvError, match=r"\*\*\*") as caught:
        ensure(spec, store=store)
    for text in (*texts_of(caught.value), caplog.text):
        assert PASSWORD not in text and QUOTED not in text and "k3y of mine" not in text


@pytest.mark.hostile
@pytest.mark.parametrize("origin", ORIGINS)
def test_another_password_is_the_same_environment(origin, tmp_path, nowhere):
    keys = []
    for user in ("me:old", "me:n@w", "token"):
        spec, more = origin(tmp_path, f"http://{user}@h:1")
        keys.append(identify(spec, nowhere | more))
    assert keys[0] == keys[1] == keys[2]


@pytest.mark.hostile
def test_a_machine_that_lacks_a_credential_is_refused_by_the_name_of_the_index(tmp_path, guarded, nowhere):
    spec, _ = of_project(tmp_path, f"http://me:{QUOTED}@{guarded}")
    recipe = Recipe.from_bytes(prepare(spec, Store(tmp_path / "store", environ=nowhere)).to_bytes())

    def install(name, **more):
        store = Store(tmp_path / name, environ=nowhere | {"UV_CACHE_DIR": str(tmp_path / f"{name}-c")} | more)
        return store.install(recipe.key, lambda: recipe, python=recipe.python).stamp["packages"]

    with pytest.raises(CredentialsError, match=r"index corp \(http://127.*UV_INDEX_CORP_PASSWORD") as caught:
        install("without")
    assert caught.value.index == "corp"
    has = {"UV_INDEX_CORP_USERNAME": "me", "UV_INDEX_CORP_PASSWORD": PASSWORD}
    assert install("variables", **has) == {"secret": "1.0"}
    netrc = tmp_path / "of-user"
    netrc.write_text(f"machine {guarded.partition(':')[0]} login me password {PASSWORD}\n")
    netrc.chmod(0o600)
    assert install("netrc", NETRC=str(netrc)) == {"secret": "1.0"}


KEYRING = """#!/bin/sh
test "$1" = get || exit 2
for last; do :; done
test "$last" = me && echo '{password}' || exit 1
"""


def in_uvs_own_store(folder, host):
    """As `uv auth login` keeps it."""
    folder.mkdir()
    kept = folder / "credentials.toml"
    kept.write_text(
        f'[[credential]]\nservice = "http://{host}/"\nusername = "me"\nscheme = "basic"\n'
        f'password = "{PASSWORD}"\n'
    )
    kept.chmod(0o600)
    return {"UV_CREDENTIALS_DIR": str(folder)}


def in_keyring(folder, _):
    folder.mkdir()
    (folder / "keyring").write_text(KEYRING.format(password=PASSWORD))
    (folder / "keyring").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "UV_KEYRING_PROVIDER": "subprocess"}


def in_keyring_by_configuration(folder, host):
    found = in_keyring(folder, host)
    (folder / "uv").mkdir()
    (folder / "uv" / "uv.toml").write_text('keyring-provider = "subprocess"\n')
    return {"PATH": found["PATH"], "XDG_CONFIG_HOME": str(folder)}


@pytest.mark.hostile
@pytest.mark.parametrize("keep", [in_uvs_own_store, in_keyring, in_keyring_by_configuration])
def test_uv_asks_its_own_store_and_the_keyring(keep, tmp_path, guarded, nowhere):
    spec = EnvironmentSpec.requirements(["secret"], default_index=f"http://me@{guarded}", carry=False)
    kept = keep(tmp_path / "kept", guarded)
    store = Store(tmp_path / "store", environ=nowhere | kept)
    built = ensure(spec, store=store)
    recipe = Recipe.from_bytes((store.root / "recipes" / f"{built.key}.zip").read_bytes())
    user = {f"UV_INDEX_{guarded.replace('.', '_').replace(':', '_')}_USERNAME": "me"}  # which is not sent
    more = {"UV_CACHE_DIR": str(tmp_path / "other")} | (user if "PATH" in kept else {})
    there = Store(tmp_path / "there", environ=store.environ | more)
    for found in (built, there.install(recipe.key, lambda: recipe, python=recipe.python)):
        assert found.stamp["packages"] == {"secret": "1.0"}
    for file in (p for root in (store.root, there.root) for p in root.rglob("*") if p.is_file()):
        assert PASSWORD not in file.read_text(errors="replace")
    without = Store(tmp_path / "without", environ=nowhere)
    if keep is not in_keyring_by_configuration:  # the driver's configuration counts on every node
        with pytest.raises(CredentialsError, match="asks for credentials, and this machine has none"):
            without.install(recipe.key, lambda: recipe, python=recipe.python)


@pytest.mark.hostile
def test_a_token_in_place_of_a_user_needs_no_password(tmp_path, guarded, nowhere):
    spec = EnvironmentSpec.requirements(["secret"], default_index=f"http://token@{guarded}", carry=False)
    built = ensure(spec, store=Store(tmp_path / "store", environ=nowhere))
    assert built.stamp["packages"] == {"secret": "1.0"}


@pytest.mark.smoke
@pytest.mark.hostile
@pytest.mark.parametrize(
    ("text", "clean", "user", "password"),
    [
        ("https://u:pa@ss@h/simple", "https://h/simple", "u", "pa@ss"),
        ("https://u:p%2Fq@h:8/x?y=a@b", "https://h:8/x?y=a@b", "u", "p/q"),
        ("https://token@h", "https://h", "token", ""),
        ("pkg @ git+https://u:p@h/r@v1", "pkg @ git+https://h/r@v1", "u", "p"),
    ],
)
def test_a_url_is_cut_at_its_last_at_sign(text, clean, user, password):
    assert without_credentials(text) == clean
    (found,) = credentials_in(text)
    assert (found.username, found.password) == (user, password)
    assert password not in repr(found).replace(found.url, "") or not password


@pytest.mark.smoke
@pytest.mark.parametrize(
    "text", ["https://h/@scope/pkg", "a@b.c", "x @ file:///d", "git+ssh://git@h/r", "https://h/x?user=a@b"]
)
def test_what_has_no_credentials_stays_as_it_is(text):
    assert without_credentials(text) == text
    assert list(credentials_in(text)) == []


@pytest.mark.hostile
@pytest.mark.timeout(60)  # where each letter begins a search of its own, it takes an hour
def test_a_long_word_is_searched_once():
    text = "a." * 500_000
    assert without_credentials(f"{text} https://u:p@h") == f"{text} https://h"
    assert [found.username for found in credentials_in(f"{text} https://u:p@h")] == ["u"]


@pytest.mark.smoke
def test_one_host_has_one_name_unless_it_knows_several_users():
    def found(*urls):
        return access_of(
            EnvironmentSpec.requirements(["x"], indexes=urls), {"PIP_CONFIG_FILE": "/dev/null"}, {}
        )

    one = found("https://u:p@h.org/a/simple", "https://u:p@h.org/b/simple")
    assert dict(one.urls) == {"h-org": "https://h.org/"}
    assert dict(one.secrets) == {"UV_INDEX_H_ORG_USERNAME": "u", "UV_INDEX_H_ORG_PASSWORD": "p"}
    two = found("https://u:p@h.org/a/simple", "https://v:q@h.org/b/simple")
    assert dict(two.urls) == {"h-org-a": "https://h.org/a/", "h-org-b": "https://h.org/b/"}
    assert two.secrets["UV_INDEX_H_ORG_B_PASSWORD"] == "q"
    assert "'q'" not in repr(two)


@pytest.mark.smoke
def test_git_is_given_its_password_by_its_own_variables():
    spec = EnvironmentSpec.requirements(["pkg @ git+https://u:p%2F@h/r@v1"])
    found = access_of(spec, {"PIP_CONFIG_FILE": "/dev/null", "GIT_CONFIG_COUNT": "1"}, {})
    assert dict(found.secrets) == {
        "GIT_CONFIG_COUNT": "2",
        "GIT_CONFIG_KEY_1": "url.https://u:p%2F@h/.insteadOf",
        "GIT_CONFIG_VALUE_1": "https://h/",
    }


@pytest.mark.hostile
def test_a_secret_of_several_lines_is_hidden_line_by_line():
    key = [
        "-----BEGIN PRIVATE KEY-----",
        "MIIEvQIBADANBgkqhkiG",
        "  w0BAQEFAASCBKcwggSj",
        "no",
        "-----END-----",
    ]
    hide = hiding({"DEPLOY_SECRET": "\r\n".join(key), "HF_TOKEN": "short", "HOME": "/home/of/somebody"})
    shown = [hide(f"| {line} |") for line in key]
    assert shown == ["| *** |", "| *** |", "|   *** |", "| no |", "| *** |"]
    assert hide("\r\n".join(key)) == "***" and hide("a short /home/of/somebody") == "a *** /home/of/somebody"
