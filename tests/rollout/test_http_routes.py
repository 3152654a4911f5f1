"""Routes of experts over HTTP, in the names and encodings of vLLM and SGLang."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rollout.engine.values import Routing
from tests.support.fake_engine import fake_routes
from tests.support.http_stack import Stack, stack_of

ROUTING = Routing(layers=(1, 3), chosen=2, experts=300, decoder_layers=5)
PROMPT = [5, 6, 7]
VLLM = {
    "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4}},
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "return_token_ids": True},
}


@pytest.fixture(scope="module")
def stack(tiny_model: Path) -> Iterator[Stack]:
    with stack_of(tiny_model, ROUTING) as made:
        yield made


def post(stack: Stack, path: str, body: dict[str, Any], status: int = 200) -> Any:
    response = httpx.post(stack.url + path, json=body, timeout=60)
    assert response.status_code == status, response.text
    return response.json()


def of_vllm(text: str) -> np.ndarray:
    """Decode as vLLM's clients do."""
    found: np.ndarray = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    return found


def whole(positions: int, first: int = 0) -> np.ndarray:
    made = np.zeros((positions, 5, 2), np.uint16)
    made[:, [1, 3]] = fake_routes(ROUTING, 0, positions)
    return made[first:]


def with_params(path: str, body: dict[str, Any], **params: Any) -> dict[str, Any]:
    if path == "/inference/v1/generate":
        return {**body, "sampling_params": {**body["sampling_params"], **params}}
    return {**body, **params}


@pytest.mark.parametrize("path", VLLM)
def test_vllm_s_routes_have_routes_of_experts(stack: Stack, path: str) -> None:
    """Always if the service keeps them, by decoder layer, of all positions but the last; unless the request says no."""
    answer = post(stack, path, VLLM[path])
    (choice,) = answer["choices"]
    prompt = len(answer["prompt_token_ids"]) if "chat" in path else len(PROMPT)
    found = of_vllm(choice["routed_experts"])
    assert found.dtype == np.uint16 and np.array_equal(found, whole(prompt + 3))
    (later,) = post(stack, path, with_params(path, VLLM[path], routed_experts_prompt_start=2))["choices"]
    assert np.array_equal(of_vllm(later["routed_experts"]), whole(prompt + 3, 2))
    (without,) = post(stack, path, with_params(path, VLLM[path], return_routed_experts=False))["choices"]
    assert "routed_experts" not in without
    refused = post(stack, path, with_params(path, VLLM[path], routed_experts_prompt_start=prompt + 1), 400)
    assert f"routed_experts_prompt_start={prompt + 1}: must be 0 to {prompt}" in str(refused)


def test_the_last_event_of_a_stream_has_them(stack: Stack) -> None:
    with httpx.stream(
        "POST", f"{stack.url}/inference/v1/generate", json={**VLLM["/inference/v1/generate"], "stream": True}
    ) as r:
        text = "".join(r.iter_text())
    assert text.count('"routed_experts"') == 1


def test_sglang_s_route_has_them_if_they_are_asked_for(stack: Stack) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4, "n": 2}, "return_routed_experts": True}
    for answer in post(stack, "/generate", body):
        ids = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), np.int32)  # as SGLang's helper does
        assert np.array_equal(ids.reshape(-1, 5, 2), whole(6))
    for answer in post(stack, "/generate", {**body, "routed_experts_start_len": 3}):
        ids = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), np.int32)
        assert np.array_equal(ids.reshape(-1, 5, 2), whole(6, 3))
    for answer in post(stack, "/generate", {**body, "return_routed_experts": None}):
        assert "routed_experts" not in answer["meta_info"]
    refused = post(stack, "/generate", {**body, "routed_experts_start_len": 4}, 400)
    assert "routed_experts_start_len=4: must be 0 to 3" in str(refused)


def test_a_service_that_keeps_none_says_how_to_start_it(tiny_model: Path) -> None:
    with stack_of(tiny_model) as plain:
        for path, body in VLLM.items():
            (choice,) = post(plain, path, with_params(path, body, routed_experts_prompt_start=900))["choices"]
            assert "routed_experts" not in choice
            refused = post(plain, path, with_params(path, body, return_routed_experts=True), 400)
            assert "start the service of a mixture of experts with routed_experts = true" in str(refused)
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4}, "return_routed_experts": True}
        assert "routed_experts = true" in str(post(plain, "/generate", body, 400))
