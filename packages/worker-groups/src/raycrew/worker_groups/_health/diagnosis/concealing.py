"""Values of secrets, taken out of what a diagnosis says, however they are written there; pure."""

import json
from collections.abc import Iterator, Mapping, Sequence

_LEAST = 6  # letters: what is shorter may be any word


def forms_of(secrets: Mapping[str, str]) -> list[tuple[str, str]]:
    """All that is to be taken out, the longest first, and the name of the secret that it is of.

    That is each value as it is, without space around it, and each line of it, as a file may end with a new
    line, and of an output only the last lines are kept; all these also as Python and JSON write them.
    """
    forms = {form: name for name, value in secrets.items() for form in _forms(value) if len(form) >= _LEAST}
    return sorted(forms.items(), key=lambda form: -len(form[0]))


def _forms(value: str) -> Iterator[str]:
    for part in {value, value.strip(), *map(str.strip, value.splitlines())}:
        yield part
        for written in (repr(part), json.dumps(part), json.dumps(part, ensure_ascii=False)):
            yield written[1:-1]


def without(text: str, forms: Sequence[tuple[str, str]]) -> str:
    """A text with the names of secrets in place of their values; takes what `forms_of` gives."""
    for form, name in forms:
        text = text.replace(form, f"<{name}>")
    return text
