"""A recipe as one piece of bytes, and back."""

import platform
import sys

from raycrew.venv_manager._store.building.probing import Expectation
from raycrew.venv_manager._store.building.recipe import Recipe, this_platform


def test_a_recipe_comes_back_as_it_was_but_for_its_secrets():
    recipe = Recipe(
        key="k",
        spec={"packages": ["demo"]},
        identity={"format": 3},
        python="3.11",
        lock="lock",
        wheels={"demo-1-py3-none-any.whl": b"\0wheel", "more-2-py3-none-any.whl": b""},
        settings="index-strategy = 'first-index'\n",
        variables={"UV_OFFLINE": "1"},
        platform=this_platform(),
        expectation=Expectation(),
        credentials={"corp": "https://corp"},
        secrets={"UV_INDEX_CORP_PASSWORD": "hidden-in-no-file"},
    )
    sent = recipe.to_bytes()
    assert b"hidden-in-no-file" not in sent
    found = Recipe.from_bytes(sent)
    for name in Recipe.__dataclass_fields__:
        assert getattr(found, name) == ({} if name == "secrets" else getattr(recipe, name)), name


def test_the_platform_of_a_recipe_is_system_and_machine():
    assert this_platform() == f"{sys.platform}-{platform.machine()}"
