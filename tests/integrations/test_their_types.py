"""Responses of the gateway, decoded by the types of vLLM, SGLang and openai, and read by the parsers of lm_eval."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, TypeAdapter

from tests.support.their_sources import FOLDER, sglang_types, vllm_types

pytestmark = pytest.mark.integrations

SOURCES = Path(sys.prefix) / FOLDER
PROMPT = [5, 6, 7, 8]
USER = [{"role": "user", "content": "ab"}]
USAGE = {"include_usage": True, "continuous_usage_stats": True}
TEXT = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
CHAT = {"messages": USER, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
CHAT_LOGPROBS = CHAT | {"logprobs": True, "top_logprobs": 2}
TOKENS = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4, "ignore_eos": True, "logprobs": 2}}


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    assert SOURCES.is_dir(), "make integrations fetches the sources"
    return vllm_types(SOURCES, tmp_path_factory.mktemp("their") / "vllm_types.py")


def post(live: Any, path: str, body: dict[str, Any]) -> Any:
    response = httpx.post(live.url + path, json=body, timeout=60)
    response.raise_for_status()
    return response.json()


def events(live: Any, path: str, body: dict[str, Any]) -> list[Any]:
    response = httpx.post(live.url + path, json=body | {"stream": True}, timeout=60)
    response.raise_for_status()
    parts = [part.removeprefix("data: ") for part in response.text.split("\n\n") if part]
    assert parts.pop() == "[DONE]" and len(parts) > 1
    return [json.loads(part) for part in parts]


def unknown(value: Any, where: str = "") -> set[str]:
    """Names that a type of pydantic has taken and does not have."""
    if isinstance(value, BaseModel):
        found = {f"{where}.{name}" for name in value.model_extra or ()}
        return found | {
            name for field in type(value).model_fields for name in unknown(getattr(value, field), f"{where}.{field}")
        }
    return {name for one in value for name in unknown(one, where)} if isinstance(value, list) else set()


OWN = {".exact_prompt_tokens", ".encoded_again", ".tools_unseen"}
"""of ours: docs/http-fields.md"""
NEMO = {f".choices.message.{name}" for name in ("prompt_token_ids", "generation_token_ids", "generation_log_probs")}
OTHERS = {".choices.logprobs.content.token_id", ".choices.logprobs.content.top_logprobs.token_id"}
"""of /inference/v1/generate, for chats as well"""


@pytest.mark.parametrize(
    ("path", "body", "whole", "part"),
    [
        ("/v1/completions", TEXT | {"logprobs": 2, "n": 2}, "CompletionResponse", "CompletionStreamResponse"),
        ("/v1/completions", TEXT | {"logprobs": 2, "echo": True, "prompt_logprobs": 3}, "CompletionResponse", None),
        ("/v1/chat/completions", CHAT_LOGPROBS, "ChatCompletionResponse", "ChatCompletionStreamResponse"),
        ("/inference/v1/generate", TOKENS, "GenerateTokensResponse", "GenerateTokensStreamResponse"),
    ],
)  # fmt: skip
def test_vllm_s_types(live: Any, vllm: ModuleType, path: str, body: dict[str, Any], whole: str, part: str | None) -> None:
    answer = getattr(vllm, whole).model_validate(post(live, path, body))
    decoded = [answer]
    if part is not None:
        decoded += map(getattr(vllm, part).model_validate, events(live, path, body | {"stream_options": USAGE}))
        assert all(each.usage is not None for each in decoded)
    for each in decoded:
        assert unknown(each) <= OWN | NEMO | OTHERS
    spans = [choice.weight_versions for each in decoded for choice in each.choices if choice.finish_reason]
    assert spans and all(
        [dataclasses.asdict(span) for span in each] == [{"version": str(live.client.info.version), "start": 0, "end": 4}]
        for each in spans
    )
    choice = answer.choices[0]
    assert len(choice.token_ids) == 4
    if "prompt_logprobs" in body:
        first, *rest = choice.prompt_logprobs
        assert first is None and all(row[id].rank >= 1 for row, id in zip(rest, PROMPT[1:], strict=True))


def test_vllm_s_types_of_other_routes(live: Any, vllm: ModuleType) -> None:
    assert vllm.ModelList.model_validate(httpx.get(f"{live.url}/v1/models").json()).data[0].id == "tiny"
    made = vllm.TokenizeResponse.model_validate(post(live, "/tokenize", {"prompt": "ab", "return_token_strs": True}))
    assert made.count == len(made.tokens) == len(made.token_strs)
    assert vllm.DetokenizeResponse.model_validate(post(live, "/detokenize", {"tokens": made.tokens})).prompt
    refused = httpx.post(f"{live.url}/v1/completions", json={"prompt": PROMPT, "n": 0}).json()
    assert vllm.ErrorResponse.model_validate(refused).error.code == 400


def test_the_old_spans_were_refused(vllm: ModuleType) -> None:
    """The control: another shape under the same name."""
    with pytest.raises(ValueError, match="validation error"):
        TypeAdapter(list[vllm.WeightVersionSpan]).validate_python([[0, 7]])


def test_sglang_s_types(live: Any) -> None:
    types = sglang_types(SOURCES)
    params = {"max_new_tokens": 40, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
    body |= {"top_logprobs_num": 2, "return_text_in_logprobs": True}
    for answer in (post(live, "/generate", body), *events(live, "/generate", body)):
        made = types.GenerateResponse.from_json_value(answer)
        meta = made.meta_info
        assert [entry.token_id for entry in meta.input_token_logprobs] == PROMPT
        assert [entry.logprob is None for entry in meta.input_token_logprobs] == [True, False, False, False]
        assert len(meta.output_token_logprobs) == meta.completion_tokens == len(made.output_ids)
        assert len(meta.output_top_logprobs) == meta.completion_tokens and len(meta.input_top_logprobs) == len(PROMPT)
        if meta.finish_reason is not None:
            (span,) = meta.weight_versions
            assert (span.version, span.start, span.end) == (meta.weight_version, 0, 40)


def test_openai_s_types(live: Any) -> None:
    from openai.types import Completion, Model
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    assert unknown(Model.model_validate(httpx.get(f"{live.url}/v1/models").json()["data"][0])) <= {
        ".max_model_len", ".root", ".parent"
    }  # fmt: skip
    body = CHAT | {"logprobs": True, "top_logprobs": 2, "return_token_ids": False}
    Completion.model_validate(post(live, "/v1/completions", TEXT | {"logprobs": 2}))
    made = ChatCompletion.model_validate(post(live, "/v1/chat/completions", body))
    data = [entry.bytes for entry in made.choices[0].logprobs.content]
    assert all(isinstance(each, list) for each in data)
    for event in events(live, "/v1/chat/completions", body | {"stream_options": USAGE}):
        ChatCompletionChunk.model_validate(event)


def test_lm_eval_s_parsers(live: Any) -> None:
    """Its requests, and what it makes of the responses: the log-prob of a continuation of two tokens."""
    pytest.importorskip("lm_eval")
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.models.sglang_generate_API import SGLANGGENERATEAPI

    whole, context = [5, 6, 7, 8, 9], 3
    (sample,) = live.client.score([whole[:context]], [[whole[context:]]])[0]
    want = float(sample.logprobs.astype("float64").sum())
    params = {"max_new_tokens": 1, "temperature": 0}
    asked = {
        "input_ids": [whole],
        "sampling_params": params,
        "logprob_start_len": 0,
        "top_logprobs_num": 1,
        "return_logprob": True,
    }
    ((found, _),) = SGLANGGENERATEAPI.parse_logprobs(post(live, "/generate", asked), tokens=[whole], ctxlens=[context])
    assert abs(found - want) < 1e-5
    asked = {"prompt": [whole], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    ((found, _),) = LocalCompletionsAPI.parse_logprobs(post(live, "/v1/completions", asked), tokens=[whole], ctxlens=[context])
    assert abs(found - want) < 1e-5
    assert SGLANGGENERATEAPI.parse_generations(post(live, "/generate", {"input_ids": [whole], "sampling_params": params}))
