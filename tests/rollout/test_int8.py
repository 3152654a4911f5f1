"""Weights in eight bits through a service: deltas, verification, receipts and the steps of a trainer."""

from __future__ import annotations

import numpy as np
import torch

from rollout.client import RolloutClient
from rollout.engine.values import Sampling
from rollout.engine.values.arithmetic import INT8
from rollout.exact import sample_logprobs, use_exact
from tests.support.samebits import torchs_log_softmax
from tests.support.tiny import tiny, tiny_engine
from tests.support.wire import serving

WAIT = 60.0
PROMPT = np.array([5, 9, 11, 42, 7, 7, 3, 120, 60, 17, 4], np.int32)


def ratios(client: RolloutClient, model: torch.nn.Module, seed: int) -> torch.Tensor:
    """Importance ratios of the tokens of a group, [tokens], whose samples the service can prove."""
    sampling = Sampling(n=4, max_tokens=12, seed=seed, ignore_eos=True)
    group = client.submit(PROMPT, sampling).result(timeout=WAIT)
    receipts = [client.receipt(each, PROMPT, sampling) for each in group]
    assert all(each.ok for each in client.verify(group, PROMPT, sampling, receipts=receipts, timeout=WAIT))
    ours = sample_logprobs(model, [(PROMPT, each.token_ids) for each in group])
    return torch.cat([(new - torch.from_numpy(each.logprobs)).exp() for new, each in zip(ours, group, strict=True)])


@torchs_log_softmax
def test_a_loop_of_refreshes_keeps_the_ratio_at_one() -> None:
    model = tiny("qwen2", torch.bfloat16, seed=3, head_dim=32)
    engine = tiny_engine(model=tiny("qwen2", torch.bfloat16, head_dim=32), dtype="bfloat16", weight_dtype="int8")
    with serving(engine) as service, RolloutClient(service.endpoint) as client:
        assert client.info.arithmetic.endswith(INT8) and client.status()["weight_dtype"] == "int8"
        exact = use_exact(model, client.info.arithmetic, client.info.block_size, 1)
        sent = []
        for step in range(3):
            done = client.refresh(model, via="delta")
            sent.append((done.via, done.sent_bytes < done.bytes / 2))
            ratio = ratios(client, model, step)
            assert (ratio == 1).all()
            (ratio * torch.randn(len(ratio), generator=torch.Generator().manual_seed(step))).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    near = parameter.grad.abs() > 0.9 * parameter.grad.abs().max()
                    parameter.sub_(near * 0.01 * parameter.grad.sign())
                    parameter.grad = None
        assert [small for _, small in sent[1:]] == [True, True], sent
        exact.remove()
        client.refresh(model)
        assert not (ratios(client, model, 9) == 1).all(), "a plain trainer would do"
