"""The gateway's routes, over a real engine with a tiny model: what dialects ask, and what they read of the answer."""

from __future__ import annotations

import inspect
import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from rollout.client.api import RolloutClient
from rollout.config import Config
from rollout.engine.engine import Engine
from rollout.engine.values import Limits, Sampling
from tests.support import adapters
from tests.support.gateway import Gateway, gateway
from tests.support.waiting import until
from tests.support.wire import serving

pytest.importorskip("starlette", reason="pip install 'rl-rollout[http]'")
pytest.importorskip("uvicorn", reason="pip install 'rl-rollout[http]'")
pytest.importorskip("httptools", reason="pip install 'rl-rollout[http]'")

PROMPT = [5, 6, 7, 8]
LIMITS = Limits(max_n=16, max_stop_token_ids=4)


class Stack(msgspec.Struct):
    """Engine, service, client and gateway."""

    engine: Any
    client: RolloutClient
    gateway: Gateway
    http: httpx.Client
    submitted: list[Any]
    """groups that the engine was given"""

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.http.post(path, json={} if body is None else body, **options)

    def complete(self, **body: Any) -> dict[str, Any]:
        return self.ok("/v1/completions", {"prompt": PROMPT, "max_tokens": 6, "seed": 3, **body})

    def ok(self, path: str, body: Any = None, **options: Any) -> dict[str, Any]:
        response = self.post(path, body, **options)
        assert response.status_code == 200, response.text
        return response.json()

    def sample(self, n: int = 1, **sampling: Any) -> list[Any]:
        options = {"max_tokens": 6, "seed": 3, **sampling}
        return self.client.submit(PROMPT, Sampling(n=n, **options)).result(60)


@pytest.fixture(scope="module")
def stack(tiny_config: Config, tiny_model: Path) -> Iterator[Stack]:
    engine = Engine(tiny_config.engine, limits=LIMITS)
    submitted: list[Any] = []
    submit = engine.submit
    engine.submit = lambda group, client="": (submitted.append(group), submit(group, client))[1]  # type: ignore[method-assign]
    with (
        serving(engine) as service,
        RolloutClient(service.endpoint) as client,
        gateway(client, tiny_model, names=("tiny", "other")) as running,
        httpx.Client(base_url=running.url, timeout=60) as http,
    ):
        yield Stack(engine, client, running, http, submitted)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error, which must have the form of every dialect."""
    body = response.json()
    assert set(body["error"]) == {"message", "type", "param", "code"} and body["error"]["code"] == response.status_code
    assert body["object"] == "error" and body["message"] == body["error"]["message"] and body["success"] is False
    return body["error"]


# vLLM, data plane


def test_completions_have_the_service_s_tokens_and_log_probs(stack: Stack) -> None:
    answer = stack.complete(model="tiny", n=3, logprobs=0, return_token_ids=True, return_tokens_as_token_ids=True)
    samples = stack.sample(n=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice, sample in zip(answer["choices"], samples, strict=True):
        ids = sample.token_ids.tolist()
        assert choice["token_ids"] == ids and choice["prompt_token_ids"] == PROMPT
        assert np.array_equal(np.array(choice["logprobs"]["token_logprobs"], np.float32), sample.logprobs)
        assert choice["logprobs"]["tokens"] == [f"token_id:{id}" for id in ids]
        assert choice["logprobs"]["top_logprobs"][0] == {f"token_id:{ids[0]}": choice["logprobs"]["token_logprobs"][0]}
        assert choice["finish_reason"] == sample.finish_reason
        assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": len(ids)}]
    total = sum(len(sample.token_ids) for sample in samples)
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": total, "total_tokens": 4 + total}
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")


def test_completions_take_text_and_lists_prompt_major(stack: Stack) -> None:
    answer = stack.complete(prompt=["ab", [5, 6, 7, 8]], n=2, return_token_ids=True, logprobs=0)
    prompts = [choice["prompt_token_ids"] for choice in answer["choices"]]
    ids = stack.ok("/tokenize", {"prompt": "ab"})["tokens"]
    assert prompts == [ids, ids, PROMPT, PROMPT] and [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for choice in answer["choices"]:
        tokens = choice["logprobs"]["tokens"]
        assert len(tokens) == len(choice["token_ids"]) and not any(token.startswith("token_id:") for token in tokens)
        offsets = choice["logprobs"]["text_offset"]
        assert offsets == sorted(offsets) and 0 == offsets[0] and offsets[-1] <= len(choice["text"])


def test_without_max_tokens_each_route_has_its_dialect_s(stack: Stack) -> None:
    greedy = {"temperature": 0, "ignore_eos": True}
    answer = stack.complete(max_tokens=None, return_token_ids=True, **greedy)
    assert len(answer["choices"][0]["token_ids"]) == 16
    with httpx.Client(base_url=stack.gateway.url, timeout=60) as http:
        body = {"input_ids": PROMPT, "sampling_params": {**greedy}}
        assert len(http.post("/generate", json=body).json()["output_ids"]) == 128
    prompt = [5] * (stack.client.info.context - 3)  # generate: all that the context leaves
    answer = stack.ok("/inference/v1/generate", {"token_ids": prompt, "sampling_params": greedy})
    assert len(answer["choices"][0]["token_ids"]) == 3 and answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("top_k", [None, 0, -1])
def test_top_k_is_off_in_every_dialect(stack: Stack, top_k: int | None) -> None:
    assert stack.complete(top_k=top_k, return_token_ids=True)["choices"][0]["token_ids"] == stack.sample()[0].token_ids.tolist()


def test_what_trl_s_worker_sends(stack: Stack) -> None:
    body = {
        "model": "tiny", "prompt": PROMPT, "max_tokens": 6, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
        "repetition_penalty": 1.0, "n": 1, "return_token_ids": True, "logprobs": 0, "seed": 2**63 - 1,
    }  # fmt: skip
    (choice,) = stack.ok("/v1/completions", body)["choices"]
    (sample,) = stack.sample(seed=2**63 - 1)
    assert choice["token_ids"] == sample.token_ids.tolist()
    assert choice["logprobs"]["token_logprobs"] == sample.logprobs.tolist()


def test_generate_sends_the_superset_of_its_versions(stack: Stack) -> None:
    params = {"max_tokens": 6, "seed": 3, "logprobs": 1, "stop_token_ids": [9], "skip_special_tokens": False}
    params |= {"routed_experts_prompt_start": 3}
    body = {
        "model": "tiny",
        "token_ids": PROMPT,
        "sampling_params": params,
        "cache_salt": "0",
        "priority": 0,
        "return_token_ids": True,
    }
    answer = stack.ok("/inference/v1/generate", body, headers={"X-Session-ID": "s"})
    (choice,), (sample,) = answer["choices"], stack.sample(stop_token_ids=(9,))
    assert choice["token_ids"] == sample.token_ids.tolist() and answer["prompt_token_ids"] == PROMPT
    for entry, id, logprob in zip(choice["logprobs"]["content"], choice["token_ids"], sample.logprobs.tolist(), strict=True):
        assert entry == {"token": f"token_id:{id}", "token_id": id, "logprob": logprob, "top_logprobs": []}
        assert math.isfinite(logprob) and logprob != -9999.0
    assert isinstance(answer["request_id"], str) and answer["request_id"]


def test_the_likeliest_tokens_in_each_dialect(stack: Stack) -> None:
    """With top_k = 2 there are two at most: what cannot be drawn is left out, where the service says -inf."""
    (sample,) = stack.sample(top_logprobs=3, top_k=2)
    rows = zip(sample.top_ids.tolist(), sample.top_logprobs.tolist(), strict=True)
    top = [{id: logprob for id, logprob in zip(*row, strict=True) if id >= 0} for row in rows]
    assert all(len(each) == 2 for each in top)
    answer = stack.complete(top_k=2, logprobs=3, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert answer["top_logprobs"] == [{f"token_id:{id}": logprob for id, logprob in each.items()} for each in top]
    params = {"max_tokens": 6, "seed": 3, "top_k": 2, "logprobs": 3}
    choice = stack.ok("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": params})["choices"][0]
    content = choice["logprobs"]["content"]
    assert [{one["token_id"]: one["logprob"] for one in entry["top_logprobs"]} for entry in content] == top
    params = {"max_new_tokens": 6, "sampling_seed": 3, "top_k": 2}
    body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, "top_logprobs_num": 3}
    meta = stack.ok("/generate", body)["meta_info"]
    assert [{id: logprob for logprob, id, _ in each} for each in meta["output_top_logprobs"]] == top
    choice = chat(stack, [{"role": "user", "content": "a"}], logprobs=True, top_logprobs=2)["choices"][0]
    pairs = [[one["logprob"] for one in entry["top_logprobs"]] for entry in choice["logprobs"]["content"]]
    assert all(len(pair) == 2 and pair[0] >= pair[1] for pair in pairs)
    assert stack.post("/v1/completions", {"prompt": PROMPT, "logprobs": 21}).status_code == 400


def test_prompts_are_scored_in_each_dialect(stack: Stack) -> None:
    prompt = [5, 6, 7, 8, 9, 10]
    (scored,) = stack.client.score([prompt[:1]], [[prompt[1:]]], Sampling(top_logprobs=2))[0]
    logprobs = scored.logprobs.tolist()
    body = {"prompt": [prompt, [5]], "max_tokens": 1, "prompt_logprobs": 2}
    whole, single = [choice["prompt_logprobs"] for choice in stack.ok("/v1/completions", body)["choices"]]
    assert single == [None] and whole[0] is None and len(whole) == 6
    for at, (id, logprob) in enumerate(zip(prompt[1:], logprobs, strict=True)):
        entry = whole[at + 1]
        assert next(iter(entry)) == str(id) and entry[str(id)]["logprob"] == logprob and 2 <= len(entry) <= 3
        first = [int(one) for one, value in entry.items() if value["rank"] == 1]
        assert first == [int(scored.top_ids[at][0])]
    answer = stack.ok(
        "/inference/v1/generate", {"token_ids": prompt, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 2}}
    )
    assert answer["prompt_logprobs"] == whole
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "logprob_start_len": 2}
    meta = stack.ok("/generate", body)["meta_info"]
    entries = [[None, prompt[2]], *map(list, zip(logprobs[2:], prompt[3:], strict=True))]
    assert [[logprob, id] for logprob, id, _ in meta["input_token_logprobs"]] == entries


def test_echo_puts_the_prompt_in_front(stack: Stack) -> None:
    plain = stack.complete(logprobs=1, return_tokens_as_token_ids=True)["choices"][0]
    echo = stack.complete(logprobs=1, return_tokens_as_token_ids=True, echo=True)["choices"][0]
    assert echo["text"] == stack.ok("/detokenize", {"tokens": PROMPT})["prompt"] + plain["text"]
    (scored,) = stack.client.score([PROMPT[:1]], [[PROMPT[1:]]])[0]
    assert echo["logprobs"]["tokens"] == [f"token_id:{id}" for id in PROMPT] + plain["logprobs"]["tokens"]
    assert echo["logprobs"]["token_logprobs"] == [None, *scored.logprobs.tolist(), *plain["logprobs"]["token_logprobs"]]
    assert len(echo["logprobs"]["top_logprobs"]) == len(echo["logprobs"]["text_offset"]) == len(echo["logprobs"]["tokens"])


@pytest.mark.parametrize("bad", [{"repetition_penalty": 0}, {"allowed_token_ids": []}], ids=str)
def test_what_asks_for_the_impossible_is_not_taken_for_a_default(stack: Stack, bad: dict[str, Any]) -> None:
    response = stack.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2, **bad})
    assert response.status_code == 400 and next(iter(bad)) in response.text


def test_a_stop_token_is_told(stack: Stack) -> None:
    (sample,) = stack.sample(max_tokens=20, ignore_eos=True)
    stop = int(sample.token_ids[3])
    (choice,) = stack.complete(max_tokens=20, ignore_eos=True, stop_token_ids=[stop], return_token_ids=True)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"][-1]) == ("stop", stop, stop)


def test_a_stop_string_cuts_the_text_in_each_dialect(stack: Stack) -> None:
    """Greedy, without ends of its own: what comes is known, and its middle characters are taken for a stop string."""
    greedy = {"temperature": 0, "ignore_eos": True}
    text = stack.complete(max_tokens=40, **greedy)["choices"][0]["text"]
    plain = [i for i in range(2, len(text) - 2) if text[i : i + 2].isascii() and text[i : i + 2].isprintable()]
    stop = text[plain[0] : plain[0] + 2]
    before = text[: text.index(stop)]
    (choice,) = stack.complete(max_tokens=40, stop=["never", stop], return_token_ids=True, **greedy)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (before, "stop", stop)
    (choice,) = stack.complete(max_tokens=40, stop=stop, include_stop_str_in_output=True, **greedy)["choices"]
    assert choice["text"] == before + stop
    params = {"max_new_tokens": 40, "stop": [stop], **greedy}
    answer = stack.ok("/generate", {"input_ids": PROMPT, "sampling_params": params})
    assert (answer["text"], answer["meta_info"]["finish_reason"]) == (before, {"type": "stop", "matched": stop})
    answer = stack.ok("/generate", {"input_ids": PROMPT, "sampling_params": params | {"no_stop_trim": True}})
    assert answer["text"] == before + stop


def test_a_stop_string_that_is_a_special_token_is_that_token(stack: Stack) -> None:
    for path, body in (("/v1/completions", {"prompt": PROMPT}), ("/generate", {"input_ids": PROMPT})):
        draws = {"stop": ["</s>", "<s>"], "stop_token_ids": [7, 1]}
        stack.ok(path, body | ({"sampling_params": draws} if path == "/generate" else draws))
        assert stack.submitted[-1].sampling.stop_token_ids == (7, 1, 2)


def stream_of(stack: Stack, path: str, body: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """The events of a stream, which must end as such."""
    response = stack.post(path, body | {"stream": True}, **options)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream"), response.text
    *lines, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(line) for line in lines]


def of_choice(events: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    return [choice for event in events for choice in event["choices"] if choice["index"] == index]


LONG = {"max_tokens": 50, "ignore_eos": True}


def test_a_stream_is_the_same_answer_in_pieces(stack: Stack) -> None:
    body = {"prompt": [PROMPT, [9]], "seed": 3, "n": 2, "logprobs": 2, "return_token_ids": True, **LONG}
    whole = stack.ok("/v1/completions", body)
    events = stream_of(stack, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    assert events[-1]["usage"] == whole["usage"] and events[-1]["choices"] == []
    for want in whole["choices"]:
        pieces = of_choice(events, want["index"])
        assert len(pieces) > 2 and [piece["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert "".join(piece["text"] for piece in pieces) == want["text"]
        assert [id for piece in pieces for id in piece["token_ids"]] == want["token_ids"]
        assert [piece["prompt_token_ids"] for piece in pieces][1:] == [None] * (len(pieces) - 1)
        assert pieces[0]["prompt_token_ids"] == want["prompt_token_ids"]
        for name, values in want["logprobs"].items():
            assert [value for piece in pieces for value in piece["logprobs"][name]] == values, name
        for name in ("finish_reason", "stop_reason", "weight_versions"):
            assert pieces[-1][name] == want[name]


def test_a_stream_of_generate_holds_what_is_new(stack: Stack) -> None:
    params = {"seed": 3, "logprobs": 1, **LONG}
    body = {"token_ids": PROMPT, "sampling_params": params, "request_id": "mine"}
    (want,) = stack.ok("/inference/v1/generate", body)["choices"]
    events = stream_of(stack, "/inference/v1/generate", body)
    pieces = of_choice(events, 0)
    assert len(pieces) > 2 and {event["request_id"] for event in events} == {"mine"}
    assert [id for piece in pieces for id in piece["token_ids"]] == want["token_ids"]
    assert [entry for piece in pieces for entry in piece["logprobs"]["content"]] == want["logprobs"]["content"]
    assert pieces[-1]["finish_reason"] == want["finish_reason"] == "length"


def test_a_stream_of_sglang_holds_all_so_far(stack: Stack) -> None:
    params = {"max_new_tokens": 200, "ignore_eos": True, "sampling_seed": 3, "skip_special_tokens": False}
    body = {"input_ids": [PROMPT, [9]], "sampling_params": params, "return_logprob": True, "rid": ["a", "b"]}
    whole = stack.ok("/generate", body)
    events = stream_of(stack, "/generate", body)
    for index, want in enumerate(whole):
        mine = [event for event in events if event["index"] == index]
        assert len(mine) > 3
        for event in mine:
            count = event["meta_info"]["completion_tokens"]
            assert event["output_ids"] == want["output_ids"][:count] and want["text"].startswith(event["text"])
            assert event["meta_info"]["output_token_logprobs"] == want["meta_info"]["output_token_logprobs"][:count]
            assert event["meta_info"]["id"] == "ab"[index]
        last = mine[-1]
        assert last["text"] == want["text"] and last["meta_info"]["finish_reason"] == want["meta_info"]["finish_reason"]
        assert sum(len(event["output_ids"]) for event in mine) < 12 * 200, "all parts together grow with the answer"


def test_a_stop_string_cuts_a_stream_where_it_cuts_the_answer(stack: Stack) -> None:
    greedy = {"temperature": 0, **LONG}
    text = stack.complete(**greedy)["choices"][0]["text"]
    plain = [i for i in range(10, len(text) - 3) if text[i : i + 3].isascii() and text[i : i + 3].isprintable()]
    stop = text[plain[0] : plain[0] + 3]
    for kept in (False, True):
        body = {"prompt": PROMPT, "stop": [stop], "include_stop_str_in_output": kept, **greedy}
        (want,) = stack.ok("/v1/completions", body)["choices"]
        pieces = of_choice(stream_of(stack, "/v1/completions", body), 0)
        assert "".join(piece["text"] for piece in pieces) == want["text"] and want["stop_reason"] == stop
        assert len(pieces) > 1 and pieces[-1]["stop_reason"] == stop


def test_with_echo_a_stream_sends_whole_samples(stack: Stack) -> None:
    body = {"prompt": PROMPT, "seed": 3, "n": 2, "echo": True, "max_tokens": 6}
    whole = stack.ok("/v1/completions", body)
    events = stream_of(stack, "/v1/completions", body)
    assert [event["choices"][0] for event in events] == whole["choices"]


def test_text_that_is_not_certain_waits() -> None:
    from rollout.http.text import final_length as certain

    assert [certain(text, ["stop"]) for text in ("abc", "abs", "absto", "abstop", "abstopde", "abstx")] == [3, 2, 2, 2, 2, 5]
    assert certain("so: <tool", ["never", "<tool_call>"]) == 4 and certain("", ["a"]) == 0 and certain("ab", []) == 2


def test_pieces_of_text_are_the_whole_whatever_the_bytes(stack: Stack) -> None:
    """Random bytes: halves of characters, and what is none at all."""
    from rollout.engine.values import Sample
    from rollout.http.text import Text, TextDecoder, TextOptions
    from rollout.models import load_tokenizer

    tokenizer = load_tokenizer(Path(stack.client.info.model))
    text = Text(tokenizer)
    rng = np.random.default_rng(0)
    told_early = 0
    for _ in range(200):
        letters = (
            rng.integers(3, 259, 40)
            if rng.random() < 0.5
            else np.array(tokenizer("größer ist 🎉 schön", add_special_tokens=False)["input_ids"])
        )
        ids = letters.astype(np.int32)
        words, at, told = TextDecoder(text, TextOptions(), ()), 0, ""
        while at < len(ids):
            step = int(rng.integers(1, 5))
            told += words.add(ids[at : at + step].tolist())
            at += step
        sample = Sample(
            group_id="", index=0, token_ids=ids, logprobs=np.zeros(len(ids), np.float32), finish_reason="length",
            weight_versions=[], prompt_tokens=1,
        )  # fmt: skip
        told_early += len(told)
        assert told + words.end(sample) == text.of(sample)
    assert told_early > 1000


def test_models_are_cards_with_the_context(stack: Stack) -> None:
    cards = stack.http.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["tiny", "other"]
    assert all(card["max_model_len"] == stack.client.info.context and card["object"] == "model" for card in cards)
    assert stack.complete(model="other")["model"] == "other"
    assert error_of(stack.post("/v1/completions", {"model": "gpt", "prompt": [1]}))["type"] == "not_found_error"


def test_metrics_have_vllm_s_names(stack: Stack) -> None:
    text = stack.http.get("/metrics").text
    values = {line.split(" ")[0]: float(line.split(" ")[1]) for line in text.splitlines() if not line.startswith("#")}
    of = {name.split("{")[0]: value for name, value in values.items()}
    assert of["vllm:num_requests_running"] == 0 and of["vllm:num_requests_waiting"] == 0
    assert 0 <= of["vllm:kv_cache_usage_perc"] <= 1 and of["vllm:generation_tokens_total"] > 0
    assert any('reason="capacity"' in name for name in values) and all('engine="0"' in name for name in values)
    (info,) = [name for name in values if name.startswith("vllm:cache_config_info")]
    assert 'kv_cache_size_tokens="65536"' in info


# a salt is a version of weights


@pytest.mark.parametrize(("salt", "live", "lag"), [(None, 9, 0), ("7", 9, 2), ("ckpt-7", 9, 2), ("9", 9, 0), ("12", 9, 0)])
def test_a_salt_is_the_lag_that_an_episode_allows(salt: str | None, live: int, lag: int) -> None:
    from rollout.http.sampling import lag_of

    assert lag_of(salt, live, Limits()) == lag


def test_the_service_gets_the_lag(stack: Stack) -> None:
    live = stack.client.status()["version"]
    stack.http.get("/weight_info")
    stack.ok("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}, "cache_salt": "0"})
    assert stack.submitted[-1].sampling.max_kv_lag == live


# what is refused never reaches the service

BAD: list[tuple[str, Any, int]] = [
    ("/v1/completions", {"prompt": PROMPT, "wrong": 1}, 400),
    ("/v1/completions", {"prompt": PROMPT, "n": "3"}, 400),
    ("/v1/completions", {"prompt": PROMPT, "n": 0}, 400),
    ("/v1/completions", {"prompt": PROMPT, "n": 17}, 400),
    ("/v1/completions", {"prompt": PROMPT, "n": 2**70}, 400),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 0}, 400),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 10**9}, 400),
    ("/v1/completions", {"prompt": PROMPT, "temperature": -1}, 400),
    ("/v1/completions", {"prompt": PROMPT, "top_p": 0}, 400),
    ("/v1/completions", {"prompt": PROMPT, "top_k": -2}, 400),
    ("/v1/completions", {"prompt": PROMPT, "seed": -1}, 400),
    ("/v1/completions", {"prompt": PROMPT, "seed": 2**63}, 400),
    ("/v1/completions", {"prompt": PROMPT, "stop_token_ids": [99999]}, 400),
    ("/v1/completions", {"prompt": PROMPT, "stop_token_ids": [3, 4, 5, 6, 7]}, 400),
    ("/v1/completions", {"prompt": PROMPT, "logprobs": -1}, 400),
    ("/v1/completions", {"prompt": PROMPT, "cache_salt": "secret"}, 400),
    ("/v1/completions", {"prompt": PROMPT, "priority": 10**9}, 400),
    ("/v1/completions", {}, 400),
    ("/v1/completions", {"prompt": []}, 400),
    ("/v1/completions", {"prompt": [[]]}, 400),
    ("/v1/completions", {"prompt": [-1]}, 400),
    ("/v1/completions", {"prompt": [2**40]}, 400),
    ("/v1/completions", {"prompt": [1.5]}, 400),
    ("/v1/completions", {"prompt": [True]}, 400),
    ("/v1/completions", {"prompt": [1, "a"]}, 400),
    ("/v1/completions", {"prompt": [[1], 2]}, 400),
    ("/v1/completions", {"prompt": [[1, "a"]]}, 400),
    ("/v1/completions", {"prompt": [[[1]]]}, 400),
    ("/v1/completions", {"prompt": [[1]] * 5000}, 400),
    ("/v1/completions", {"prompt": [1] * 9000}, 400),
    ("/v1/completions", {"prompt": PROMPT, "prompt_logprobs": -1}, 400),
    ("/v1/completions", {"prompt": PROMPT, "prompt_logprobs": 21}, 400),
    ("/v1/completions", {"prompt": PROMPT, "suffix": "a"}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 1}, 400),
    ("/v1/completions", {"prompt": PROMPT, "best_of": 4}, 400),
    ("/v1/completions", {"prompt": PROMPT, "structured_outputs": {"regex": "a"}}, 400),
    ("/inference/v1/generate", {"token_ids": PROMPT}, 400),
    ("/inference/v1/generate", {"token_ids": "text", "sampling_params": {}}, 400),
    ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}, 400),
    ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"n": [1]}}, 400),
    ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"wrong": 1}}, 400),
    ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {}, "features": {"a": 1}}, 400),
    ("/v1/chat/completions", {"messages": []}, 400),
    ("/v1/chat/completions", {"messages": [{"content": "no role"}]}, 400),
    ("/v1/chat/completions", {"messages": "text"}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 7}]}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"tokenize": True}}, 400),
    ("/tokenize", {}, 400),
    ("/tokenize", {"prompt": "a", "messages": []}, 400),
    ("/detokenize", {"tokens": [-1]}, 400),
    ("/detokenize", {"tokens": [10**9]}, 400),
    ("/detokenize", {"tokens": "a"}, 400),
    ("/generate", {}, 400),
    ("/generate", {"input_ids": PROMPT, "text": "a"}, 400),
    ("/generate", {"input_ids": [1, [2]]}, 400),
    ("/generate", {"input_ids": PROMPT, "sampling_params": [{}, {}]}, 400),
    ("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": -3}}, 400),
    ("/generate", {"input_ids": PROMPT, "sampling_params": {"wrong": 1}}, 400),
    ("/generate", {"input_ids": PROMPT, "sampling_params": {"json_schema": "{}"}}, 400),
    ("/generate", {"input_ids": PROMPT, "stream": 1}, 400),
    ("/generate", {"input_ids": PROMPT, "rid": ["a", "b"]}, 400),
    ("/generate", {"input_ids": PROMPT, "rid": "a" * 300}, 400),
    ("/generate", {"input_ids": [-1], "stream": True}, 400),
    ("/v1/completions", {"prompt": [-1], "stream": True}, 400),
    ("/v1/completions", {"prompt": PROMPT, "request_id": ""}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "request_id": "a" * 300}, 400),
    ("/inference/v1/generate", {"token_ids": [-1], "sampling_params": {}, "stream": True}, 400),
    ("/generate", {"input_ids": PROMPT, "lora_path": "a"}, 400),
    ("/update_weights", {"weight_dir": "/no/such/folder"}, 400),
    ("/update_weights", {"weight_dir": ""}, 400),
    ("/update_weights", {"weight_dir": "a\0b"}, 400),
    ("/update_weights", {"weight_dir": 3}, 400),
    ("/update_weights", {"weight_dir": None}, 400),
    ("/update_weights", {"update_info": {"names": []}}, 400),
    ("/init_weight_transfer_engine", {"init_info": {}}, 404),
    ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/no/such/folder"}, 404),
    ("/load_lora_adapter", {"lora_name": "a", "lora_path": ""}, 400),
    ("/load_lora_adapter", {"lora_name": "a", "lora_path": "b\0c"}, 400),
    ("/load_lora_adapter", {"lora_name": "", "lora_path": "b"}, 400),
    ("/load_lora_adapter", {"lora_name": "a" * 300, "lora_path": "b"}, 400),
    ("/load_lora_adapter", {"lora_name": "tiny", "lora_path": "b"}, 400),
    ("/v1/load_lora_adapter", {"lora_name": "a"}, 400),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b", "base_model_name": "gpt"}, 404),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b", "wrong": 1}, 400),
    ("/unload_lora_adapter", {}, 400),
    ("/unload_lora_adapter", {"lora_name": "a"}, 404),
    ("/v1/unload_lora_adapter", {"lora_name": 3}, 400),
    ("/completely/unknown", {}, 404),
    ("/collective_rpc", {"method": "x"}, 404),
    ("/update_weights_from_disk", {}, 400),
    ("/update_weights_from_disk", {"model_path": "/no/such/folder"}, 400),
    ("/update_weights_from_disk", {"model_path": "a", "load_format": "dummy"}, 400),
    ("/update_weights_from_tensor", {}, 404),
    ("/v1/embeddings", {"input": "a", "model": "tiny"}, 404),
    ("/v1/responses", {"input": "a"}, 404),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "reasoning_effort": "high"}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "service_tier": "priority"}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "modalities": ["text", "audio"]}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "web_search_options": {}}, 400),
    ("/pause_generation", {"mode": "never"}, 400),
    ("/abort_request", {}, 400),
    ("/abort_request", {"rid": 3}, 400),
    ("/abort_requests", {"request_ids": "a"}, 400),
    ("/abort_requests", {"ids": ["a"]}, 400),
    ("/resume_memory_occupation", {"tags": ["all"]}, 400),
    ("/release_memory_occupation", {"tags": 3}, 400),
    ("/reset_prefix_cache", {"reset_running_requests": True}, 400),
    ("/pause?mode=soft", None, 400),
    ("/pause?mode=keep&wrong=1", None, 400),
    ("/pause?mode=keep&clear_cache=maybe", None, 400),
    ("/sleep?level=3", None, 400),
    ("/sleep?tags=weights", None, 400),
    ("/wake_up?tags=kv_cache", None, 400),
    ("/wake_up?tags=all", None, 400),
    ("/release_memory_occupation", {"tags": ["weights"]}, 400),
    ("/no/such/path", None, 404),
    ("/v1/models", None, 405),
]


@pytest.mark.some(60)
@pytest.mark.parametrize(("path", "body", "status"), BAD, ids=[f"{path}-{i}" for i, (path, _, _) in enumerate(BAD)])
def test_bad_input_is_refused_in_the_dialect_s_form(stack: Stack, path: str, body: Any, status: int) -> None:
    before = len(stack.submitted)
    response = stack.post(path, body)
    assert response.status_code == status, response.text
    error = error_of(response)
    assert error["message"] and len(error["message"]) < 1000
    assert len(stack.submitted) == before, "the service saw it"
    assert stack.client.status()["state"] == "running"


def test_every_route_is_asked_badly(stack: Stack) -> None:
    """A route that takes a body or parameters has bad ones in the list above; one that takes none is named here."""
    from rollout.http import adapters, chat, control, sglang, status, vllm

    nothing = {"/resume", "/continue_generation", "/flush_cache"}
    sources = [Path(inspect.getfile(module)).read_text() for module in (adapters, chat, control, sglang, status, vllm)]
    routes = {path for source in sources for path in re.findall(r'post\("([^"]+)"', source)}
    assert len(routes) > 20
    bad = {path.split("?")[0] for path, _, _ in BAD}
    assert routes - bad - nothing == set()
    for path, instead in control.UNSUPPORTED.items():
        response = stack.post(path)
        assert response.status_code == 404 and error_of(response)["message"] == f"{path} is not supported: {instead}"


@pytest.mark.some(28)
@pytest.mark.parametrize(
    "content", [b"{", b"[]", b'"a"', b"\xff\xfe", b'{"prompt": NaN}', b"[" * 100_000, b'{"prompt": ' + b"[" * 50_000, b"\0"]
)
@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/inference/v1/generate", "/generate", "/v1/chat/completions", "/update_weights", "/abort_requests",
     "/load_lora_adapter"],
)  # fmt: skip
def test_what_is_no_json_is_refused(stack: Stack, path: str, content: bytes) -> None:
    response = stack.http.post(path, content=content)
    assert response.status_code == 400 and error_of(response)["type"] == "invalid_request_error"


def test_a_good_request_reaches_the_service(stack: Stack) -> None:
    """The control of the tests above: what they count does count."""
    before = len(stack.submitted)
    stack.complete()
    assert len(stack.submitted) == before + 1


def test_what_sampling_lacks_is_refused_and_its_neutral_values_are_not(stack: Stack) -> None:
    neutral = {
        "repetition_penalty": 1.0,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "stop": [],
        "best_of": 1,
    }
    stack.complete(**neutral, use_beam_search=False, skip_special_tokens=True, user="me")
    wanted = {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "logit_bias": {"5": 1.0},
        "stop": "x",
    }
    for name, value in wanted.items():
        response = stack.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2, name: value})
        served = name in Sampling.__struct_fields__
        assert response.status_code == (200 if served else 400), response.text
        assert served or error_of(response)["param"] == name


# pauses, sleep, weights


@pytest.fixture
def running_request(stack: Stack) -> Iterator[Callable[[], httpx.Response]]:
    """A long request in a thread; the result waits for its answer."""
    answers: list[httpx.Response] = []
    body = {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "return_token_ids": True, "logprobs": 0}
    thread = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{stack.gateway.url}/v1/completions", json=body, timeout=120))
    )
    before = stack.client.status()["generated_tokens"]
    thread.start()
    until(lambda: stack.client.status()["generated_tokens"] > before)

    def result() -> httpx.Response:
        thread.join(120)
        return answers[0]

    yield result
    stack.client.abort_all()
    thread.join(120)
    assert not thread.is_alive()


def test_pause_abort_ends_what_runs_with_what_it_has(stack: Stack, running_request: Callable[[], httpx.Response]) -> None:
    assert stack.ok("/pause?mode=abort")["status"] == "paused"
    (choice,) = running_request().json()["choices"]
    assert choice["finish_reason"] == "abort" and len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) > 0
    assert stack.http.get("/is_paused").json() == {"is_paused": True}
    assert stack.ok("/resume")["status"] == stack.ok("/resume")["status"] == "resumed"  # prime-rl repeats it
    assert stack.http.get("/is_paused").json() == {"is_paused": False}
    stack.complete()


def test_pause_keep_lets_go_on(stack: Stack, running_request: Callable[[], httpx.Response]) -> None:
    assert stack.ok("/pause?mode=keep&clear_cache=false")["mode"] == "keep"
    stack.ok("/resume")
    assert running_request().json()["choices"][0]["finish_reason"] == "length"


def test_pause_wait_lets_it_finish(stack: Stack, running_request: Callable[[], httpx.Response]) -> None:
    stack.ok("/pause?mode=wait")
    assert running_request().json()["choices"][0]["finish_reason"] == "length"
    stack.ok("/resume")


def test_sglang_s_pause_aborts(stack: Stack, running_request: Callable[[], httpx.Response]) -> None:
    stack.ok("/pause_generation")
    assert running_request().json()["choices"][0]["finish_reason"] == "abort"
    stack.ok("/continue_generation")


def test_abort_request_ends_what_runs(stack: Stack, running_request: Callable[[], httpx.Response]) -> None:
    assert stack.http.get("/v1/loads?include=core").json()["loads"][0]["num_total_reqs"] == 1
    assert stack.ok("/abort_request", {"abort_all": True})["aborted"] == 1
    assert running_request().json()["choices"][0]["finish_reason"] == "abort"
    until(lambda: stack.http.get("/v1/loads").json()["num_total_reqs"] == 0)


def test_whoever_hangs_up_leaves_nothing_running(stack: Stack) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8000, "ignore_eos": True}
    before = stack.client.status()["generated_tokens"]
    with (
        httpx.Client(base_url=stack.gateway.url, timeout=httpx.Timeout(60, read=0.5)) as http,
        pytest.raises(httpx.ReadTimeout),
    ):
        http.post("/v1/completions", json=body)
    until(lambda: stack.client.status()["running"] == 0)
    assert stack.client.status()["generated_tokens"] - before < 8000


def weights(stack: Stack, folder: Path, factor: float) -> Path:
    """A folder with the live weights times a factor."""
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True)
    source = Path(stack.client.info.model)
    save_file(
        {name: tensor * factor for name, tensor in load_file(source / "model.safetensors").items()},
        folder / "model.safetensors",
    )
    return folder


def test_weights_of_a_folder_as_prime_rl_sends_them(stack: Stack, tmp_path: Path) -> None:
    old, live = stack.sample()[0], stack.client.status()["version"]
    folder = weights(stack, tmp_path / f"step_{live + 5}", 3.0)
    (folder / "NCCL_READY").touch()
    stack.ok("/pause?mode=keep&clear_cache=false")
    assert stack.ok("/update_weights", {"weight_dir": str(folder)}) == {"status": "ok", "weight_version": str(live + 5)}
    stack.ok("/resume")
    (choice,) = stack.complete(return_token_ids=True, logprobs=0)["choices"]
    assert choice["weight_versions"] == [{"version": str(live + 5), "start": 0, "end": len(choice["token_ids"])}]
    assert choice["logprobs"]["token_logprobs"] != old.logprobs.tolist()
    assert stack.http.get("/weight_info").json() == {"weight_version": str(live + 5)}
    # slime: a version of its own, which is kept or refused
    body = {"model_path": str(folder)}
    for label in ("1", str(live + 5), "step-9", "٣", "9" * 30, -1):
        refused = error_of(stack.post("/update_weights_from_disk", {**body, "weight_version": label}))
        assert refused["code"] == 400 and refused["param"] == "weight_version"
    for label, version in ((str(live + 8), live + 8), (live + 9, live + 9), (None, live + 10)):
        assert stack.ok("/update_weights_from_disk", {**body, "weight_version": label})["success"] is True
        assert stack.http.get("/get_weight_version").json() == {"weight_version": str(version)}


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_an_adapter_is_loaded_by_name_and_unloaded(stack: Stack, tmp_path: Path, prefix: str) -> None:
    """As prime-rl sends it (a folder step_N), SGLang and vLLM."""
    live, base = stack.client.status()["version"], stack.client.weights_status()["base_digest"]
    before = stack.complete(return_token_ids=True, logprobs=0)["choices"][0]
    folder = adapters.write(tmp_path / f"step_{live + 3}", width=32)
    body = {"lora_name": "policy", "lora_path": folder.as_posix()}
    assert error_of(stack.post("/v1/completions", {"model": "policy", "prompt": PROMPT}))["code"] == 404
    answer = stack.ok(f"{prefix}/load_lora_adapter", body)
    assert answer["success"] is True and answer["weight_version"] == str(live + 3)
    merged = stack.client.weights_status()["digest"]
    assert merged != base
    after = stack.complete(model="policy", return_token_ids=True, logprobs=0)["choices"][0]
    assert after["weight_versions"][0]["version"] == str(live + 3) and after["logprobs"] != before["logprobs"]
    assert [card["id"] for card in stack.http.get("/v1/models").json()["data"]] == ["tiny", "other", "policy"]
    named = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}, "lora_path": "policy"}
    stack.ok("/generate", named)
    assert stack.post("/generate", named | {"lora_path": "another"}).status_code == 400
    other = stack.post(f"{prefix}/load_lora_adapter", body | {"lora_name": "second"})
    assert other.status_code == 400 and "one at a time" in error_of(other)["message"]
    stack.ok(f"{prefix}/load_lora_adapter", body | {"load_inplace": True} if prefix else body)  # the same name again
    assert stack.client.weights_status()["digest"] == merged
    stack.ok(f"{prefix}/unload_lora_adapter", {"lora_name": "policy"})
    assert stack.client.weights_status()["digest"] == base
    assert stack.complete(return_token_ids=True, logprobs=0)["choices"][0]["logprobs"] == before["logprobs"]
    assert stack.post("/v1/completions", {"model": "policy", "prompt": PROMPT}).status_code == 404


HALVES = {
    "a configuration of which the end is missing": ("adapter_config.json", lambda whole: whole[: len(whole) // 2]),
    "an empty configuration": ("adapter_config.json", lambda whole: b""),
    "a configuration that is no object": ("adapter_config.json", lambda whole: b"[]"),
    "brackets only": ("adapter_config.json", lambda whole: b"[" * 100_000),
    "no text": ("adapter_config.json", lambda whole: b"\xff\xfe" + whole),
    "empty tensors": ("adapter_model.safetensors", lambda whole: b""),
    "a header of which the end is missing": ("adapter_model.safetensors", lambda whole: whole[:40]),
    "tensors of which the end is missing": ("adapter_model.safetensors", lambda whole: whole[:-1]),
}


@pytest.mark.parametrize("half", HALVES)
def test_an_adapter_that_is_still_being_written_is_tried_again(stack: Stack, tmp_path: Path, half: str) -> None:
    """500 for half a file, 404 for none: clients of a network file system try again after these two, and have it then."""
    name, cut = HALVES[half]
    folder, before = adapters.write(tmp_path / "policy", width=32), stack.client.weights_status()["digest"]
    whole = (folder / name).read_bytes()
    body = {"lora_name": "policy", "lora_path": folder.as_posix()}
    (folder / name).write_bytes(cut(whole))
    for prefix in ("", "/v1"):
        answer = error_of(stack.post(f"{prefix}/load_lora_adapter", body))
        assert answer["code"] == 500 and "still being written" in answer["message"] and answer["param"] == "lora_path"
    (folder / name).unlink()
    answer = error_of(stack.post("/load_lora_adapter", body))
    assert answer["code"] == 404 and "adapter_config.json" in answer["message"] and answer["param"] == "lora_path"
    assert stack.client.weights_status()["digest"] == before
    (folder / name).write_bytes(whole)
    stack.ok("/load_lora_adapter", body)
    stack.ok("/unload_lora_adapter", {"lora_name": "policy"})


@pytest.mark.parametrize("path", ["nowhere", "a file/policy", "empty"])
def test_an_adapter_that_is_not_there_yet_is_404(stack: Stack, tmp_path: Path, path: str) -> None:
    (tmp_path / "a file").touch()
    (tmp_path / "empty").mkdir()
    answer = stack.post("/load_lora_adapter", {"lora_name": "policy", "lora_path": str(tmp_path / path)})
    assert error_of(answer)["code"] == 404


def test_whole_weights_end_an_adapter(stack: Stack, tmp_path: Path) -> None:
    folder = adapters.write(tmp_path / "adapter", width=32)
    stack.ok("/load_lora_adapter", {"lora_name": "policy", "lora_path": folder.as_posix()})
    stack.ok("/update_weights", {"weight_dir": str(stack.client.info.model)})
    assert stack.post("/unload_lora_adapter", {"lora_name": "policy"}).status_code == 404
    assert stack.post("/v1/completions", {"model": "policy", "prompt": PROMPT}).status_code == 404


def test_sleep_and_wake(stack: Stack) -> None:
    assert stack.ok("/sleep?level=1")["status"] == "sleeping"
    assert stack.http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert error_of(stack.post("/sleep?level=1"))["type"] == "invalid_request"
    stack.ok("/wake_up")
    assert stack.http.get("/is_sleeping").json() == {"is_sleeping": False}
    stack.ok("/release_memory_occupation")
    stack.ok("/resume_memory_occupation", {"tags": None})
    stack.ok("/sleep")
    stack.ok("/wake_up?tags=weights")
    assert stack.client.status()["asleep"] == ["kv"]
    stack.ok("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
    stack.complete()


def test_what_probes_read(stack: Stack) -> None:
    assert stack.http.get("/health").status_code == stack.http.get("/health_generate").status_code == 200
    assert stack.http.get("/liveness").json() == {"status": "ok"}
    assert stack.http.get("/get_world_size").json() == {"world_size": 1}
    assert stack.ok("/reset_prefix_cache")["success"] is True and stack.http.get("/flush_cache").status_code == 200
    info = stack.http.get("/server_info", params={"config_format": "json"}).json()
    assert info["vllm_config"]["model_config"] == {
        "model": "tiny", "dtype": "torch.float32", "logprobs_mode": "processed_logprobs",
        "max_model_len": stack.client.info.context,
    }  # fmt: skip
    assert info["vllm_config"]["parallel_config"]["data_parallel_size"] == 1
    assert (info["tp_size"], info["pp_size"], info["ep_size"], info["enable_memory_saver"]) == (1, 1, 1, False)
    (worker,) = stack.http.get("/workers").json()["workers"]
    assert worker["url"] == stack.gateway.url


# SGLang


def test_generate_of_sglang(stack: Stack) -> None:
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 6, "stop": None, "stop_token_ids": None}
    params |= {"skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False, "sampling_seed": 3}
    answer = stack.ok("/generate", {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True})
    (sample,) = stack.sample()
    meta = answer["meta_info"]
    assert [id for _, id, _ in meta["output_token_logprobs"]] == sample.token_ids.tolist() == answer["output_ids"]
    assert [logprob for logprob, _, _ in meta["output_token_logprobs"]] == sample.logprobs.tolist()
    assert meta["finish_reason"]["type"] == sample.finish_reason and meta["prompt_tokens"] == 4
    assert meta["completion_tokens"] == len(sample.token_ids)
    assert meta["weight_version"] == str(sample.weight_versions[-1][1])


def test_generate_of_sglang_in_batches(stack: Stack) -> None:
    params = [{"max_new_tokens": 2, "ignore_eos": True}, {"max_new_tokens": 3, "ignore_eos": True}]
    answers = stack.ok("/generate", {"input_ids": [PROMPT, [9]], "sampling_params": params})
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [2, 3]
    answers = stack.ok("/generate", {"text": "ab", "sampling_params": {"n": 2, "max_new_tokens": 2}})
    assert [answer["index"] for answer in answers] == [0, 1]


# chat


def chat(stack: Stack, messages: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
    options = {"messages": messages, "max_tokens": 5, "seed": 1, "return_token_ids": True, **body}
    return stack.ok("/v1/chat/completions", options, headers={"X-Session-ID": "one"})


def test_chat_speaks_through_the_template(stack: Stack) -> None:
    answer = chat(stack, [{"role": "user", "content": "ab"}], logprobs=True, n=2)
    wanted = stack.ok("/tokenize", {"messages": [{"role": "user", "content": "ab"}]})["tokens"]
    assert answer["prompt_token_ids"] == wanted and answer["object"] == "chat.completion"
    assert stack.ok("/detokenize", {"tokens": wanted})["prompt"] == "<s>user\nab</s><s>assistant\n"
    for choice in answer["choices"]:
        assert choice["message"]["role"] == "assistant" and isinstance(choice["message"]["content"], str)
        assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]
        assert choice["message"]["generation_token_ids"] == choice["token_ids"]
    parts = chat(stack, [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}])
    assert parts["prompt_token_ids"] == wanted


def turn_after(stack: Stack, first: dict[str, Any], **body: Any) -> tuple[list[int], list[int]]:
    """Ids of the first turn, and of the prompt of the second."""
    message = {name: first["choices"][0]["message"].get(name) for name in ("role", "content", "refusal")}
    more = [{"role": "user", "content": "ab"}, message, {"role": "user", "content": "and"}]
    exact = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    return exact, chat(stack, more, **body)["prompt_token_ids"]


def test_earlier_turns_keep_their_exact_ids(stack: Stack) -> None:
    """Random bytes do not survive text: encoded anew, the first turn would have other ids."""
    first = chat(stack, [{"role": "user", "content": "ab"}], ignore_eos=True, max_tokens=12)
    exact, prompt = turn_after(stack, first)
    assert prompt[: len(exact)] == exact
    tail = stack.ok("/detokenize", {"tokens": prompt[len(exact) :]})["prompt"]
    assert tail == "</s><s>user\nand</s><s>assistant\n"
    text = first["choices"][0]["message"]["content"]
    anew = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": text}, {"role": "user", "content": "and"}]
    assert stack.ok("/tokenize", {"messages": anew})["tokens"] != prompt  # the control


def test_ids_that_come_along_with_a_message_are_taken(stack: Stack) -> None:
    first = chat(stack, [{"role": "user", "content": "ab"}], ignore_eos=True, max_tokens=12)
    message = first["choices"][0]["message"]
    more = [{"role": "user", "content": "ab"}, message, {"role": "user", "content": "and"}]
    body = {"messages": more, "max_tokens": 1, "return_token_ids": True}
    prompt = stack.ok("/v1/chat/completions", body)["prompt_token_ids"]  # of no session
    exact = message["prompt_token_ids"] + message["generation_token_ids"]
    assert prompt[: len(exact)] == exact


def test_another_session_s_ids_are_not_taken(stack: Stack) -> None:
    first = chat(stack, [{"role": "user", "content": "ab"}], ignore_eos=True, max_tokens=12, seed=4)
    more = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
        {"role": "user", "content": "and"},
    ]
    body = {"messages": more, "max_tokens": 1, "return_token_ids": True}
    prompt = stack.ok("/v1/chat/completions", body, headers={"X-Session-ID": "two"})["prompt_token_ids"]
    assert prompt == stack.ok("/tokenize", {"messages": more})["tokens"]


def test_kept_turns_are_bounded() -> None:
    from rollout.http.conversation import TokenIdCache

    turns = TokenIdCache(max_tokens=100)
    for i in range(50):
        turns.add("s", [{"role": "assistant", "content": str(i)}], {}, np.zeros(10, np.int32))
    found = [turns.find("s", [{"role": "assistant", "content": str(i)}], {}) is not None for i in range(50)]
    assert found == [False] * 40 + [True] * 10


def test_a_chat_stream_holds_the_same_message(stack: Stack) -> None:
    messages = [{"role": "user", "content": "ab"}]
    options = {"messages": messages, "seed": 1, "n": 2, "logprobs": True, "return_token_ids": True, **LONG}
    whole = stack.ok("/v1/chat/completions", options)
    session = {"X-Session-ID": "streamed"}
    events = stream_of(stack, "/v1/chat/completions", options, headers=session)
    assert all(event["object"] == "chat.completion.chunk" for event in events)
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    for want in whole["choices"]:
        pieces = of_choice(events, want["index"])
        assert len(pieces) > 2 and [piece["delta"].get("role") for piece in pieces] == ["assistant"] + [None] * (
            len(pieces) - 1
        )
        assert "".join(piece["delta"]["content"] for piece in pieces) == want["message"]["content"]
        assert [entry for piece in pieces for entry in piece["logprobs"]["content"]] == want["logprobs"]["content"]
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + [want["finish_reason"]]
    message = {"role": "assistant", "content": whole["choices"][0]["message"]["content"]}
    more = {"messages": [*messages, message, *messages], "max_tokens": 1, "return_token_ids": True}
    exact = whole["prompt_token_ids"] + whole["choices"][0]["token_ids"]
    assert stack.ok("/v1/chat/completions", more, headers=session)["prompt_token_ids"][: len(exact)] == exact
