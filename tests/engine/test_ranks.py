"""The rank of a scored token is 1 + the number of tokens with a larger logit, whatever computes the draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout.client.api import RolloutClient
from rollout.engine.cpu.kernels import Kernels
from rollout.engine.forward.sampling import SamplingBatch, launch_draws, sample
from rollout.engine.values import Sampling
from tests.support.draws import cuts_of

VOCABULARY = 300


def batch(tokens: list[int], top: list[int], drawn: list[int]) -> SamplingBatch:
    """Given tokens of a row of logits each, and draws."""
    count = len(tokens) + len(drawn)
    return SamplingBatch(
        logits_row=np.arange(count),
        temperature=np.full(count, 0.7, np.float32),
        cuts=cuts_of([Sampling()] * count),
        uniform=np.array([*(-1.0 - token for token in tokens), *(0.5 for _ in drawn)]),
        forbidden=[],
        raw=False,
        top=np.array(top, np.int64),
    )


@pytest.mark.parametrize("kernel", ["torch", "kernel"])
def test_given_tokens_have_ranks(kernel: str) -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(7, VOCABULARY)).astype(np.float32))
    logits[2, 5] = logits[2].max() + 1
    tokens = [3, 299, 5, 17, 40]
    mine = batch(tokens, [2, 2, 1, 0, 20, 3, 0], [0, 0])
    found = sample(logits, mine, Kernels("plain") if kernel == "kernel" else None)
    want = [1 + int((logits[row] > logits[row, token]).sum()) for row, token in enumerate(tokens)]
    assert found.ranks is not None and found.ranks.tolist() == [*want[:3], 0, want[4], 0, 0] and want[2] == 1
    assert sample(logits, batch([], [3, 3], [0, 0])).ranks is None, "nothing is ranked that was drawn"


def test_what_is_ranked_is_sent_as_all_else() -> None:
    """By `send`, so that the host does not wait for the device."""
    logits, sent = torch.randn(3, VOCABULARY), list[np.ndarray]()

    def send(arrays: list[np.ndarray]) -> list[torch.Tensor]:
        sent.extend(arrays)
        return [torch.from_numpy(each) for each in arrays]

    launch_draws(logits, batch([7, 8], [2, 0, 1], [0]), None, send).read()
    assert [each.tolist() for each in sent] == [[0], [7]] and all(each.dtype == np.int64 for each in sent)


def test_scored_prompts_tell_ranks(tiny_service: str) -> None:
    prompt, tokens = [5, 6, 7], list(range(10, 40))
    with RolloutClient(tiny_service) as client:
        (top,), (none,) = (client.score([prompt], [[tokens]], Sampling(top_logprobs=k))[0] for k in (20, 0))
        (drawn,) = client.submit(prompt, Sampling(top_logprobs=3, max_tokens=4)).result(60)
    assert top.ranks.shape == (len(tokens),) and top.ranks.dtype == np.int32 and none.ranks is None and drawn.ranks is None
    assert top.nbytes == top.token_ids.nbytes * 3 + top.top_ids.nbytes * 2 and top.to_dict()["ranks"] == top.ranks.tolist()
    assert any(rank > 20 for rank in top.ranks), "those that the most probable ones do not tell"
    for id, rank, ids in zip(tokens, top.ranks, top.top_ids.tolist(), strict=True):
        assert (ids.index(id) + 1 if id in ids else None) in (rank, None) and (id in ids) == (rank <= 20)
