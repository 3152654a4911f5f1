"""TRL's own asynchronous rollout worker, with tools, over the gateway; weights by `ServiceWeights` while it runs."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.waiting import until

pytestmark = pytest.mark.integrations

CONVERSATIONS, TURNS = 8, 4


def look(place: str = "here") -> str:
    """Look at a place.

    Args:
        place: where to look.
    """
    return f"nothing at {place}"


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def calling(tokenizer: Any, ids: list[int], **_: Any) -> dict[str, Any]:
    """Read any answer as a call: a tiny model with random weights writes none."""
    call = {"type": "function", "function": {"name": "look", "arguments": {"place": "there"}}}
    return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True), "tool_calls": [call]}


def test_trl_s_tool_worker_finishes_its_turns(live: Any, service_logprobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("trl.experimental.async_grpo.async_rollout_worker")
    from accelerate import PartialState
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rollout.integrations.trl import ServiceWeights

    PartialState(cpu=True)  # its logger wants one, as its child process makes it
    monkeypatch.setattr(module, "parse_response", calling)
    monkeypatch.setattr(module, "is_chat_template_prefix_preserving", lambda *_: True)
    tokenizer = AutoTokenizer.from_pretrained(live.folder)
    tokenizer.response_schema = {"type": "object"}
    turns: list[tuple[list[int], list[int], list[float]]] = []
    buffer: queue.Queue[Any] = queue.Queue()
    failed, why = threading.Event(), queue.Queue[Any]()
    loop = module._AsyncRolloutLoop(
        model_name="tiny", dataset=[{"prompt": [{"role": "user", "content": f"question {i}"}]} for i in range(50)],
        reward_funcs=[reward], processing_class=tokenizer, eos_token_ids=[2], rollout_buffer=buffer,
        model_version_value=SimpleNamespace(value=0), heartbeat_value=SimpleNamespace(value=0.0), failed_event=failed,
        exception_info_queue=why, metrics_queue=queue.Queue(), tools=[look], num_generations=4,
        max_inflight_tasks=CONVERSATIONS, vllm_server_url=live.url, max_tokens=12, max_tool_calling_iterations=TURNS - 1,
    )  # fmt: skip
    one_turn = loop._generate_one_turn

    async def noted(prompt: list[int]) -> Any:
        ids, logprobs = await one_turn(prompt)
        turns.append((list(prompt), ids, logprobs))
        return ids, logprobs

    monkeypatch.setattr(loop, "_generate_one_turn", noted)
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        samples = []
        until(lambda: buffer.qsize() >= CONVERSATIONS or failed.is_set(), "8 conversations were scored", 120)
        first = live.client.status()["version"]
        model = AutoModelForCausalLM.from_pretrained(live.folder)
        weights = ServiceWeights(live.client)
        weights.init_weight_transfer()
        drawn = list(turns)
        weights.send_weights((name, parameter.detach() * 1.5) for name, parameter in model.named_parameters())
        assert live.client.status()["version"] == first + 1  # while conversations run
        until(lambda: buffer.qsize() >= 2 * CONVERSATIONS or failed.is_set(), "it goes on", 120)
        while not buffer.empty():
            samples.append(buffer.get_nowait())
    finally:
        if not failed.is_set():
            loop._loop.call_soon_threadsafe(loop._stop_event.set)
        thread.join(120)
    assert not failed.is_set(), why.get_nowait()
    assert not thread.is_alive()
    assert len(samples) >= 2 * CONVERSATIONS and len(turns) >= 2 * CONVERSATIONS * TURNS
    answers = [sum(message["role"] == "assistant" for message in sample.completion) for sample in samples]
    assert set(answers) == {TURNS}, "each conversation had its turns, with a tool's answer between two"
    assert loop._counters["rollout/vllm_retry_total"] == 0
    trained = {tuple(sample.old_log_probs[sample.completion_mask == 1].tolist()) for sample in samples}
    assert trained and all(np.isfinite(values).all() for values in trained)
    weights.send_weights(
        (name, parameter.detach()) for name, parameter in model.named_parameters()
    )  # what `drawn` was drawn from
    for prompt, ids, logprobs in drawn[: CONVERSATIONS * TURNS]:
        assert np.array_equal(np.array(logprobs, np.float32), service_logprobs(prompt, ids))
