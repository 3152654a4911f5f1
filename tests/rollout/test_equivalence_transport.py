"""The same samples, to the bit, in process, over loopback and over sockets from another process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout.client.api import RolloutClient
from rollout.config import Config
from rollout.engine.engine import Engine
from rollout.engine.values import Group, Sample, Sampling
from rollout.service.build import open_service
from rollout.transport.loopback import LoopbackService
from tests.support.faulty_link import Proxy

SAMPLING = Sampling(n=4, max_tokens=24, temperature=1.1, top_p=0.95, seed=11, raw_logprobs=True, ignore_eos=True)
GREEDY = Sampling(n=1, max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPTS = [[int(x) for x in np.random.default_rng(i).integers(3, 259, size)] for i, size in enumerate((5, 70, 33, 1))]
SAMPLINGS = [SAMPLING, SAMPLING, GREEDY, SAMPLING]
Bits = dict[tuple[int, int], tuple[bytes, bytes, bytes | None, str]]


def bits(samples: list[Sample]) -> Bits:
    found: Bits = {}
    for s in samples:
        raw = None if s.raw_logprobs is None else s.raw_logprobs.tobytes()
        found[int(s.group_id), s.index] = (s.token_ids.tobytes(), s.logprobs.tobytes(), raw, s.finish_reason)
        assert (s.token_ids.dtype, s.logprobs.dtype) == (np.int32, np.float32) and len(s.token_ids) == 24
    return found


def through(client: RolloutClient, samplings: list[Sampling] = SAMPLINGS) -> Bits:
    return bits(list(client.generate(PROMPTS, samplings, group_ids=["0", "1", "2", "3"], timeout=60)))


@pytest.fixture(scope="module")
def make_engine(tiny_config: Config, tiny_model: Path) -> Iterator[Callable[[], Engine]]:
    threads = torch.get_num_threads()
    yield lambda: Engine(tiny_config.engine, limits=tiny_config.limits)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def in_process(make_engine: Callable[[], Engine]) -> Bits:
    engine = make_engine()
    for i, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        engine.submit(Group(str(i), np.array(prompt, np.int32), sampling))
    samples = []
    while engine.has_work:
        samples += engine.step()
    found = bits(samples)
    assert len(found) == 13
    return found


def test_loopback(make_engine: Callable[[], Engine], in_process: Bits) -> None:
    end = LoopbackService()
    service = open_service(make_engine(), transport=end)
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        with RolloutClient(transport=end.connect()) as client:
            assert through(client) == in_process
    finally:
        service.stop()
        thread.join(60)
    assert not thread.is_alive()


def test_sockets(tiny_service: str, in_process: Bits) -> None:
    with RolloutClient(tiny_service) as client:
        assert through(client) == in_process


def test_sockets_whose_link_breaks(tiny_service: str, in_process: Bits) -> None:
    with Proxy(tiny_service) as proxy, RolloutClient(proxy.address) as client:
        found: Bits = {}
        for sample in client.generate(PROMPTS, SAMPLINGS, group_ids=["0", "1", "2", "3"], timeout=60):
            if not found:
                proxy.cut()
            found |= bits([sample])
        assert proxy.cuts and found == in_process


def test_another_seed_is_seen(tiny_service: str, in_process: Bits) -> None:
    other = Sampling(n=4, max_tokens=24, temperature=1.1, top_p=0.95, seed=12, raw_logprobs=True, ignore_eos=True)
    with RolloutClient(tiny_service) as client:
        found = through(client, [other, SAMPLING, GREEDY, SAMPLING])
    assert {key for key in found if found[key] != in_process[key]} >= {(0, 0), (0, 1)}
    assert {key[0] for key in found if found[key] != in_process[key]} == {0}
