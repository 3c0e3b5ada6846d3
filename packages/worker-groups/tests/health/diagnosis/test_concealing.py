"""No value of a declared secret is left in a diagnosis, however it is written there; no Ray is needed."""

import json

import pytest

from raycrew.worker_groups._health.diagnosis import concealing
from raycrew.worker_groups._health.diagnosis.making import Subjects, make
from raycrew.worker_groups._health.diagnosis.parts import Findings
from raycrew.worker_groups.sharding import WorkerFacts, assign_ranks

FACTS = [WorkerFacts("node-a", "10.0.0.1", 41)]
KEY = "-----BEGIN KEY-----\nMIIEpAIBAAKCAQEA\n\nq83vEjRWeJCrze8S\nab==\n-----END KEY-----\n"
ACCOUNT = '{\n  "user": "somebody",\r\n\t"pass": "p\\\\w-ü-14\'7"\n}\n'


def without(text, secrets):
    return concealing.without(text, concealing.forms_of(secrets))


def test_values_are_taken_out_unless_they_may_be_any_word():
    secrets = {"TOKEN": "s3cr3t", "SHORT": "five5", "OTHER": "longer-one"}
    assert without("s3cr3t, five5, longer-one, s3cr3t", secrets) == "<TOKEN>, five5, <OTHER>, <TOKEN>"
    assert without("s3cr3t", {}) == "s3cr3t"


def test_the_longest_is_taken_out_first():
    secrets = {"A": "hunter22", "B": "hunter22tail", "C": "my-hunter22tail"}
    for names in ("ABC", "CBA", "BAC"):
        told = without("hunter22, hunter22tail, my-hunter22tail", {name: secrets[name] for name in names})
        assert told == "<A>, <B>, <C>"


@pytest.mark.hostile
@pytest.mark.parametrize(
    "secret",
    ["abc123xyz\n", "  spaced out \t", KEY, ACCOUNT, "quote\"'quote\\s"],
    ids=["of a file", "with space", "of lines", "of JSON", "with quotes"],
)
@pytest.mark.parametrize(
    "write",
    [
        str,
        str.strip,
        repr,
        json.dumps,
        lambda value: json.dumps(value, ensure_ascii=False),
        lambda value: "\n".join(line for line in value.splitlines() if line),
        lambda value: "\n".join(value.splitlines()[-3:]),
        lambda value: "\n".join(repr(line) for line in value.splitlines()),
    ],
    ids=["whole", "stripped", "repr", "json", "letters", "lines", "last lines", "list"],
)
def test_no_line_of_a_secret_is_in_any_file(tmp_path, secret, write):
    told = f"Bearer {write(secret)} was rejected"
    found = {0: Findings(stacks=told, told_by="py-spy", output=told, missing={"record": told})}
    subjects = Subjects("mine.Worker", assign_ranks([0], FACTS, [0], "mine"), FACTS, {"SECRET": secret})
    diagnosis = make("mine", subjects, found, told, 0.0, tmp_path)
    parts = {line.strip() for line in secret.splitlines() if len(line.strip()) >= 6}
    forms = {f(part) for part in parts for f in (str, lambda p: repr(p)[1:-1], lambda p: json.dumps(p)[1:-1])}
    for path in diagnosis.folder.iterdir():
        text = path.read_text()
        assert "was rejected" in text and "<SECRET>" in text
        assert [form for form in forms if form in text] == []
    for text in (diagnosis.text, diagnosis.ranks[0].stacks, diagnosis.reason):
        assert [form for form in forms if form in text] == []


@pytest.mark.parametrize("secret", ["abc123xyz\n", KEY, ACCOUNT], ids=["of a file", "of lines", "of JSON"])
@pytest.mark.parametrize(
    "write", [str, repr, json.dumps, lambda value: json.dumps(value, ensure_ascii=False)]
)
def test_not_a_letter_is_left_of_a_secret_that_is_written_whole(secret, write):
    told = without(f"({write(secret)})", {"SECRET": secret})
    assert told.replace("'", "").replace('"', "") == "(<SECRET>)"
