"""What a notebook shows of values: one line each, tables, and plain lists."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from rollout import Group, PartialSample, RolloutClient, Sample, Sampling, TokenChunk, WeightsRefused
from rollout.transport.loopback import LoopbackService
from tests.support.fake_engine import FakeEngine
from tests.support.wire import serving

WAIT = 60.0
"""for what comes: a bound for hangs only"""


def sample(count: int = 200, **fields: Any) -> Sample:
    given = {"group_id": "#5", "index": 0, "finish_reason": "length", "weight_versions": [(0, 3)] if count else []} | fields
    ids, logprobs = np.arange(count, dtype=np.int32), np.full(count, -0.614, np.float32)
    return Sample(prompt_tokens=7, token_ids=ids, logprobs=logprobs, **given)


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (sample(), "Sample('#5'[0] 200 tokens, length, mean logprob -0.61, version 3)"),
        (sample(4, weight_versions=[(0, 3), (2, 5)]), "Sample('#5'[0] 4 tokens, length, mean logprob -0.61, versions 3 to 5)"),
        (
            sample(0, finish_reason="error", error="NaN\n", group_id="it's"),
            "Sample(\"it's\"[0] 0 tokens, error: 'NaN\\n', no version)",
        ),
        (PartialSample.of(sample(2, index=4)), "PartialSample([4] 2 tokens, version 3)"),
        (TokenChunk(index=1, first=3, seed=0, **sample(2).columns()), "TokenChunk([1] 2 tokens, version 3)"),
        (Sampling(), "Sampling()"),
        (Sampling(n=8, temperature=0.5), "Sampling(n=8, temperature=0.5)"),
        (Group("a", np.arange(90, dtype=np.int32), Sampling(n=8)), "Group('a' 90 prompt tokens, Sampling(n=8))"),
    ],
)
def test_a_value_is_one_line(value: object, line: str) -> None:
    assert repr(value) == line and f"{[value]}" == f"[{line}]"


def test_what_a_client_holds_is_one_line_each() -> None:
    end = LoopbackService()
    with serving(FakeEngine(), end), RolloutClient(transport=end.connect()) as client:
        running = client.submit([1, 2], Sampling(n=3, max_tokens=40_000), "it")
        assert repr(running) == "Handle('it' 0 of 3 samples, 2 prompt tokens)"
        running.cancel()
        running.result(WAIT)
        assert repr(running) == "Handle('it' 3 of 3 samples, 2 prompt tokens)"
        refused = client.submit([1001], Sampling(n=2), "bad")
        refused.cancel()
        assert repr(refused.group) == "Group('bad' 1 prompt tokens, Sampling(n=2))"
        with pytest.raises(ValueError):
            refused.result(WAIT)
        assert repr(refused).startswith("Handle('bad' 0 of 2 samples, 1 prompt tokens, InvalidRequest: \"prompt holds")
        assert repr(client.info) == "Welcome('fake' version 3, context 100000, 1000 token ids)"
        assert repr(client).startswith("RolloutClient('") and repr(client).endswith("' 'fake' version 3)")
    assert repr(client).endswith(", closed)")
    assert repr(WeightsRefused("no")) == "WeightsRefused('no')"


def test_notebooks_show_tables() -> None:
    shown = sample(2, group_id="<b>", error="a & b")._repr_html_()
    assert "<td>&lt;b&gt;[0]</td><td>2</td><td>length</td><td>-0.61</td><td>version 3</td>" in shown and "a &amp; b" in shown
    end = LoopbackService()
    with serving(FakeEngine(), end), RolloutClient(transport=end.connect()) as client:
        handle = client.submit([1, 2], Sampling(n=3, max_tokens=4), "it")
        handle.result(WAIT)
        table = handle._repr_html_()
    assert [table.count(f"<td>it[{index}]</td>") for index in range(4)] == [1, 1, 1, 0] and table.count("<tr>") == 4


def test_samples_go_into_data_frames() -> None:
    full = sample(2, top_ids=np.array([[1, 2], [3, -1]], np.int32), stopped_by="x")
    plain = full.to_dict()
    assert list(plain) == list(Sample.__struct_fields__) and json.loads(json.dumps(plain)) == plain
    assert (plain["token_ids"], plain["top_ids"], plain["weight_versions"]) == ([0, 1], [[1, 2], [3, -1]], [[0, 3]])
    assert plain["raw_logprobs"] is None and plain["logprobs"] == full.logprobs.tolist() and plain["stopped_by"] == "x"
