"""What every generation worker does: one class of tests, run over each kind of worker."""

import numpy as np
import pytest
import torch
from generation_stage import END, MODEL, PROMPTS, batch_of, local_stage, rows_of

from generation import AsleepError, GenerationError, PromptError, RefusedError, SamplingError
from raycrew.tensor_transport import BatchedDataDict
from raycrew.tensor_transport.integrations.vllm import GreedyReference, WeightCheckError

LONG = {"max_tokens": 400, "ignore_eos": True, "seed": 3}
TOLERANCE = 2e-4
BAD_PROMPTS = [
    (BatchedDataDict({}), "no column 'prompt_ids'"),
    (BatchedDataDict({"prompt_ids": []}), "no prompts"),
    (batch_of([[5], []]), "row 1 is empty"),
    (batch_of([[5], [6, 61]]), "row 1 has the id 61 at position 1"),
    (batch_of([[-1]]), "the id -1"),
    (batch_of([[5] * 512]), "512 tokens"),
    (BatchedDataDict({"prompt_ids": torch.ones(1, 3, dtype=torch.bool)}), "the id True"),
    (
        BatchedDataDict({"prompt_ids": torch.ones(1, 3, dtype=torch.int64), "prompt_lengths": torch.ones(1)}),
        "prompt_lengths must be whole numbers",
    ),
    (BatchedDataDict({"prompt_ids": [5, 6]}), r"a row of ids for each prompt, not \[5, 6\]"),
    (BatchedDataDict({"prompt_ids": np.array([5, 6])}), "a row of ids for each prompt, not array"),
    (BatchedDataDict({"prompt_ids": [[5, 0]], "prompt_lengths": [3]}), r"\[3\] do not fit prompt_ids of"),
    (BatchedDataDict({"prompt_ids": [[5, 6]], "prompt_lengths": [-1]}), r"\[-1\] do not fit"),
    (BatchedDataDict({"prompt_ids": [[5]], "prompt_index": [1 << 63]}), "prompt_index must fit int64"),
]
BAD_SAMPLING = [
    ({"n": 0}, "n must be"),
    ({"temperature": -1}, "temperature must be"),
    ({"top_p": 0}, "top_p must be"),
    ({"max_token": 3}, "do you mean 'max_tokens'"),
]


def assert_plain(stage, prompts, row):
    """Each token has the log-probability that the version it names gives it."""
    index, _, tokens, logprobs, versions, _ = row
    for version in set(versions):
        wanted = stage.plain_logprobs(prompts[index], tokens, version)
        off = [abs(a - b) for a, b, v in zip(wanted, logprobs, versions, strict=True) if v == version]
        assert max(off) < TOLERANCE, (version, max(off))


def reasons_of(future):
    return {row[5] for row in rows_of(future.result(120))}


def check_what_waits_for_room(worker):
    """An engine that is for two requests at a time says of the others that they wait, and comes to them."""
    with local_stage(worker, max_running=2) as stage:
        future = stage.begin(batch_of(), {**LONG, "max_tokens": 100})
        found = stage.wait_for(lambda found: found.running)
        assert (found.state, found.running, found.waiting) == ("awake", 2, len(PROMPTS) - 2)
        assert reasons_of(future) == {"length"}
        found = stage.metrics()
        assert (found.running, found.waiting, found.tokens) == (0, 0, 100 * len(PROMPTS))


class Conformance:
    """`stage` has a worker that holds some version, and is used by all tests one after the other."""

    def test_logprobs_are_those_of_a_plain_forward_pass(self, stage):
        found = stage.generate(batch_of(), {"n": 2, "max_tokens": 24, "seed": 1})
        rows = rows_of(found)
        assert [row[:2] for row in rows] == [(p, s) for p in range(len(PROMPTS)) for s in range(2)]
        assert found["output_lengths"].tolist() == [len(row[2]) for row in rows]
        for row in rows:
            assert set(row[4]) == {stage.version}
            assert_plain(stage, PROMPTS, row)

    def test_greedy_takes_the_trainers_likeliest_tokens_and_a_check_says_so(self, stage):
        stage.sync()
        report = stage.check(tolerance=TOLERANCE)
        assert (report.version, report.first_other) == (stage.version, None)
        assert report.difference < TOLERANCE
        before = stage.references(stage.version - 1)
        other = stage.call("check", before)
        assert (other.version, other.digest) == (report.version, report.digest), "what is held"
        assert other.first_other is not None
        assert other.difference > TOLERANCE
        with stage.refused(WeightCheckError, "the trainer with"):
            stage.call("check", before, tolerance=TOLERANCE)
        if report.digest is not None:
            with stage.refused(WeightCheckError, f"{report.digest}, and 1f of those that were sent"):
                stage.call("check", stage.references(), digest="1f")
        with stage.refused(GenerationError, r"prompt 0 ended after 12 of 13 tokens \(length\)"):
            stage.call("check", [GreedyReference((5,) * 500, (5,) * 13, (0.0,) * 13)])
        for nothing in ([], [GreedyReference((5,), (), ())]):
            with stage.refused(ValueError, "nothing to compare"):
                stage.call("check", nothing)

    def test_a_seed_gives_the_same_samples(self, stage):
        how = {"n": 2, "max_tokens": 12, "seed": 7, "top_p": 0.9, "top_k": 20, "temperature": 0.8}
        found = [rows_of(stage.generate(batch_of(), how)) for _ in range(2)]
        for row in found[0]:
            assert_plain(stage, PROMPTS, row)  # however it was chosen
        rows = [[row[:3] for row in part] for part in found]
        assert rows[0] == rows[1]
        other = [row[:3] for row in rows_of(stage.generate(batch_of(), {**how, "seed": 8}))]
        assert other != rows[0]
        assert rows[0][0][2] != rows[0][1][2], "samples of one prompt differ"
        unseeded = [rows_of(stage.generate(batch_of(), {"max_tokens": 12})) for _ in range(2)]
        assert unseeded[0] != unseeded[1]

    def test_samples_end_with_a_stop_token_or_for_their_length(self, stage):
        every = tuple(range(2, 61))
        (stopped,) = rows_of(stage.generate(batch_of(PROMPTS[:1]), {"stop_token_ids": every, "seed": 0}))
        assert stopped[5] == "stop"
        assert len(stopped[2]) == 1, "the token that ended it is there"
        ended = rows_of(stage.generate(batch_of(), {"n": 8, "max_tokens": 200, "seed": 0}))
        for _, _, tokens, _, _, reason in ended:
            assert (reason == "stop") == (tokens[-1] == END)
            assert END not in tokens[:-1]
        assert "stop" in {row[5] for row in ended}
        (cut,) = rows_of(stage.generate(batch_of([[5] * 500]), {**LONG, "max_tokens": 99}))
        assert (len(cut[2]), cut[5]) == (MODEL["max_position_embeddings"] - 500, "length")

    def test_a_sample_that_has_ended_is_streamed_while_others_are_on_their_way(self, stage):
        context = MODEL["max_position_embeddings"]
        streamed = stage.stream(batch_of([[5] * (context - 1), [6]]), {**LONG, "max_tokens": context - 2})
        (first,) = rows_of(next(streamed))
        assert (first[0], len(first[2]), first[5]) == (0, 1, "length")
        assert stage.call("abort") == 1
        assert [(row[0], row[5]) for batch in streamed for row in rows_of(batch)] == [(1, "abort")]

    def test_samples_that_are_streamed_are_those_of_a_call(self, stage):
        how = {"n": 2, "max_tokens": 6, "seed": 5}
        rows = [rows_of(batch)[0] for batch in stage.stream(batch_of(), how)]
        assert sorted(row[:3] for row in rows) == [
            row[:3] for row in rows_of(stage.generate(batch_of(), how))
        ]

    def test_who_stops_to_listen_ends_the_samples(self, stage):
        before = stage.metrics().aborted
        future = stage.begin(batch_of(), LONG)
        stage.wait_for(lambda found: found.running)
        future.cancel()
        assert stage.wait_for(lambda found: not found.running).aborted == before + len(PROMPTS)

    def test_aborted_samples_are_given_as_they_are(self, stage):
        first = stage.begin(batch_of(PROMPTS[:2]), LONG, request_id="first")
        second = stage.begin(batch_of(PROMPTS[2:]), {**LONG, "max_tokens": 40}, request_id="second")
        stage.wait_for(lambda found: found.running == len(PROMPTS))
        stage.wait_for_tokens(8, first)
        assert stage.call("abort", "first") == 2
        for row in rows_of(first.result(120)):
            assert row[5] == "abort"
            assert 0 < len(row[2]) < LONG["max_tokens"]
            assert_plain(stage, PROMPTS, row)
        assert reasons_of(second) == {"length"}
        assert stage.call("abort", "nobody") == 0
        third = stage.begin(batch_of(), LONG, request_id="third")
        stage.wait_for(lambda found: found.running == len(PROMPTS))
        assert stage.call("abort") == len(PROMPTS)
        assert reasons_of(third) == {"abort"}

    def test_samples_on_their_way_go_on_under_new_weights(self, stage):
        future = stage.begin(batch_of(PROMPTS[:2]), {**LONG, "max_tokens": 150})
        stage.wait_for(lambda found: found.running == 2)
        stage.wait_for_tokens(8, future)
        stage.call("pause", "continue")
        held, before = stage.metrics(), stage.version
        assert (held.state, held.running) == ("paused", 2)
        after = stage.sync()
        assert stage.metrics().tokens == held.tokens, "a pause holds through an update"
        stage.call("resume")
        for row in rows_of(future.result(120)):
            assert set(row[4]) == {before, after}
            assert row[4] == sorted(row[4])
            assert row[5] == "length"
            assert_plain(stage, PROMPTS, row)

    def test_an_update_pauses_by_itself(self, stage):
        future = stage.begin(batch_of(PROMPTS[:1]), LONG)
        stage.wait_for(lambda found: found.running)
        stage.sync()
        (row,) = rows_of(future.result(120))
        assert len(row[2]) == LONG["max_tokens"]
        assert_plain(stage, PROMPTS, row)

    def test_a_pause_lets_samples_end_or_ends_them(self, stage):
        future = stage.begin(batch_of(), {**LONG, "max_tokens": 30})
        stage.wait_for_tokens(4, future)
        stage.call("pause", "finish")
        assert stage.metrics().running == 0
        assert reasons_of(future) == {"length"}
        late = stage.begin(batch_of(), {"max_tokens": 2, "ignore_eos": True})
        assert stage.wait_for(lambda found: found.waiting == len(PROMPTS)).state == "paused"
        stage.call("resume")
        assert reasons_of(late) == {"length"}
        future = stage.begin(batch_of(), LONG)
        stage.wait_for_tokens(4, future)
        stage.call("pause", "abort")
        assert reasons_of(future) == {"abort"}
        stage.call("resume")

    def test_bad_input_is_refused(self, stage):
        before = stage.metrics()
        for batch, says in BAD_PROMPTS:
            with stage.refused(PromptError, says):
                stage.generate(batch)
        for options, says in BAD_SAMPLING:
            with stage.refused(SamplingError, says):
                stage.generate(batch_of(), options)
        with stage.refused(ValueError, "there is no mode 'stop'"):
            stage.call("pause", "stop")
        with stage.refused(RefusedError, "no adapter 'tuned' is loaded"):
            stage.generate(batch_of(), {}, adapter="tuned")
        assert stage.metrics() == before

    def test_a_sleeper_wakes_with_the_latest_weights(self, stage):
        on_its_way = stage.begin(batch_of(), {**LONG, "max_tokens": 40})
        stage.wait_for(lambda found: found.running)
        stage.call("pause")
        with stage.refused(GenerationError, "wait in a pause"):
            stage.call("sleep", "finish")
        stage.call("resume")
        stage.call("sleep")
        assert reasons_of(on_its_way) == {"length"}
        assert stage.metrics().state == "asleep"
        assert "asleep" in stage.call("explain")
        with stage.refused(AsleepError, "wake"):
            stage.generate(batch_of())
        stage.model.publish_weights()
        stage.call("wake")
        assert "to sleep is to" in stage.call("explain")
        for row in rows_of(stage.generate(batch_of(), {"max_tokens": 4})):
            assert set(row[4]) == {stage.version}
            assert_plain(stage, PROMPTS, row)

    def test_a_sleeper_wakes_to_other_samples_where_there_is_no_seed(self, stage):
        found = []
        for _ in range(2):
            stage.call("sleep")
            stage.call("wake")
            found.append([row[2] for row in rows_of(stage.generate(batch_of(), {"max_tokens": 12}))])
        assert found[0] != found[1]

    def test_metrics_tell_of_the_work(self, stage):
        before = stage.metrics()
        future = stage.begin(batch_of(), {**LONG, "max_tokens": 100})
        busy = stage.wait_for(lambda found: found.running == len(PROMPTS) and found.kv_cache_use > 0)
        assert busy.state == "awake"
        future.result(120)
        after = stage.metrics()
        assert (after.tokens - before.tokens, after.finished - before.finished) == (400, 4)
        assert (after.running, after.waiting, after.weight_version) == (0, 0, stage.version)
        assert after.tokens_per_s > 0
        stage.call("reset_prefix_cache")

    @pytest.mark.parametrize("mode", ["finish", "abort"])
    def test_samples_may_end_before_an_update(self, stage, mode):
        assert stage.call("set_on_update", mode) is None
        future = stage.begin(batch_of(), {**LONG, **({"max_tokens": 60} if mode == "finish" else {})})
        stage.wait_for(lambda found: found.running)
        before = stage.version
        stage.sync()
        for row in rows_of(future.result(120)):
            assert set(row[4]) <= {before}
            assert row[5] == {"finish": "length", "abort": "abort"}[mode]
        stage.call("set_on_update", "continue")
