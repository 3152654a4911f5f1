"""Text, offsets and log-probs' bytes describe the tokens: for every tokenizer, whole and in a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.client.token_text import TokenText, visible
from rollout.engine.values import Sample
from tests.support.scripted import Scripted, byte_fallback, byte_level, scripted, word_pieces, write_tokenizer

pytest.importorskip("starlette", reason="pip install 'rl-rollout[http]'")
pytest.importorskip("uvicorn", reason="pip install 'rl-rollout[http]'")
pytest.importorskip("httptools", reason="pip install 'rl-rollout[http]'")


@pytest.fixture(scope="module")
def s(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    folder = tmp_path_factory.mktemp("scripted") / "model"
    with scripted(folder, byte_level(folder)) as made:
        yield made


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    folder = tmp_path_factory.mktemp("fallback") / "model"
    with scripted(folder, byte_fallback(folder)) as made:
        yield made


KINDS = {
    "byte-level": byte_level,
    "byte fallback": byte_fallback,
    "llama 2": lambda folder: byte_fallback(folder, strip=True),
    "word pieces": word_pieces,
}


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_the_whole_for_any_tokenizer(kind: str, tmp_path: Path) -> None:
    """Random ids: halves of characters, special tokens between them, what is no text at all. With text the whole is the
    tokenizer's own."""
    from rollout.http.text import Text, TextDecoder, TextOptions
    from rollout.models import load_tokenizer

    write_tokenizer(tmp_path, KINDS[kind](tmp_path))
    tokenizer = load_tokenizer(tmp_path)
    text, rng = Text(tokenizer), np.random.default_rng(0)
    known = tokenizer("hello world, a do", add_special_tokens=False)["input_ids"]
    assert text.texts.text(known) == tokenizer.decode(known)
    face = tokenizer("größer 🎉 漢字", add_special_tokens=False)["input_ids"]
    if kind != "word pieces":
        assert text.texts.text(face) == tokenizer.decode(face) == "größer 🎉 漢字"
    for trial in range(300):
        ids = rng.integers(0, len(tokenizer), 30).tolist() if trial % 2 else face[: rng.integers(1, len(face) + 1)]
        reason = ("length", "stop")[trial % 3 == 0]
        options = TextOptions(skip_special=bool(trial % 5), keep_stop=bool(trial % 7 == 0))
        decoder, at, told = TextDecoder(text, options, ("zz",)), 0, ""
        most = len(ids) - 1 if reason == "stop" else len(ids)  # the token that ends it comes with the sample
        while at < most:
            step = int(rng.integers(1, 5))
            told += decoder.add(ids[at : min(most, at + step)])
            at += step
        sample = Sample(
            group_id="", index=0, token_ids=np.array(ids, np.int32), logprobs=np.zeros(len(ids), np.float32),
            finish_reason=reason, weight_versions=[], prompt_tokens=1,
        )  # fmt: skip
        assert told + decoder.end(sample) == text.of(sample, options.skip_special, options.keep_stop)


def test_a_vocabulary_that_is_not_the_tokenizer_s_is_not_used(tmp_path: Path) -> None:
    """The control of the comparison: a decoder that does something else."""
    from tokenizers import decoders

    from rollout.models import load_tokenizer

    tokenizer = byte_fallback(tmp_path)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Replace("a", "b"), decoders.Fuse()])
    write_tokenizer(tmp_path, tokenizer)
    loaded = load_tokenizer(tmp_path)
    ids = loaded("a cat", add_special_tokens=False)["input_ids"]
    assert visible(TokenText(loaded).parts(ids), False) == loaded.decode(ids) == "b cbt"


@pytest.mark.parametrize("missing", [1, 2, 4])
def test_characters_before_the_last_one_are_kept(fallback: Scripted, s: Scripted, missing: int) -> None:
    for service in (fallback, s):
        said = service.ids("o漢字漢字")
        choice = service.complete("Once", said, max_tokens=len(said) - missing)
        whole = "o漢字漢" if missing < 3 else "o漢字"
        assert choice["text"].startswith(whole) and set(choice["text"][len(whole) :]) == {"\ufffd"}


def test_the_token_that_stops_is_no_text(s: Scripted) -> None:
    dot = s.ids(".")
    for said, body, text in (
        ("a time. The", {"stop_token_ids": dot}, "a time"),
        ("a time. The", {"stop_token_ids": dot, "include_stop_str_in_output": True}, "a time."),
        ("a time", {"skip_special_tokens": False}, "a time"),
        ("a time", {"skip_special_tokens": False, "include_stop_str_in_output": True}, "a time<|end|>"),
        ("a<|stop|>b", {"skip_special_tokens": False, "stop": ["<|stop|>"]}, "a"),
        ("a<|turn|>bXY", {"stop": ["XY"]}, "ab"),
        ("a<|turn|>bXY", {"stop": [">bX"], "skip_special_tokens": False}, "a<|turn|"),
        ("a<|turn|>bXY", {"stop": [">bX"]}, "a<|turn|".removesuffix("<|turn|")),
    ):
        assert s.complete("Once", said, **body)["text"] == text, (said, body)
        assert s.chat(said, **body)["choices"][0]["message"]["content"] == text
        stop = {"no_stop_trim": body.get("include_stop_str_in_output"), "max_new_tokens": 60, "temperature": 0}
        params = {name: value for name, value in body.items() if not name.startswith("include")} | stop
        s.put({4: [*s.ids(said), s.ends[0]]})
        assert s.post("/generate", {"text": "Once", "sampling_params": params})["text"] == text


def test_echo_is_one_text_with_the_prompt_as_it_was_given(s: Scripted) -> None:
    face = s.ids("🙂")
    choice = s.complete([*s.ids("hi "), *face[:2]], [*face[2:], *s.ids(" ok"), s.ends[0]], echo=True, logprobs=0)
    assert choice["text"] == "hi 🙂 ok"
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 3, 3, 3, 4, 5, 6, 7]
    prompt = "<|turn|>user\né<|end|>\n"
    for given in (prompt, s.ids(prompt)):
        choice = s.complete(given, "well<|turn|>done", echo=True, logprobs=1)
        assert choice["text"] == prompt + "welldone"
        offsets = choice["logprobs"]["text_offset"]
        assert offsets[len(s.ids(prompt))] == len(prompt) and max(offsets) == len(choice["text"])
        assert choice["text"][offsets[0] : offsets[1]] == "<|turn|>"
    cut = s.complete(prompt, "well XY", echo=True, stop=["XY"])
    assert cut["text"] == prompt + "well "


def test_offsets_point_into_the_text(s: Scripted) -> None:
    choice = s.complete("Once", "é<|turn|>🙂b", logprobs=0)
    assert choice["text"] == "é🙂b" and choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 1, 1, 2, 3]
    broken = s.complete("Once", [s.ids("é")[0], *s.ids("ab"), s.ends[0]], logprobs=0)
    assert broken["text"] == "\ufffdab" and broken["logprobs"]["text_offset"] == [0, 1, 2, 3]


def test_bytes_are_those_of_the_token(s: Scripted, fallback: Scripted) -> None:
    for service in (s, fallback):
        for names in (False, True):
            answer = service.chat("é 🙂", logprobs=True, top_logprobs=2, return_tokens_as_token_ids=names)
            *content, end = answer["choices"][0]["logprobs"]["content"]
            assert b"".join(bytes(entry["bytes"]) for entry in content) == "é 🙂".encode()
            assert bytes(end["bytes"]) == b"<|end|>" and len(content) > 3


def test_names_of_the_most_probable_tokens_are_distinct(s: Scripted) -> None:
    likely = dict.fromkeys(s.ids("🙂漢"), 24.0)
    choice = s.complete("Once", "abc", logprobs=5, max_tokens=3, logit_bias={str(id): 24.0 + i for i, id in enumerate(likely)})
    logprobs = choice["logprobs"]
    for token, logprob, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert len(top) >= 5 and top[token] == logprob and len(set(top.values())) >= 5
    assert any(name.startswith("bytes:\\x") for name in logprobs["top_logprobs"][0])


def test_separators_are_escaped_in_events(s: Scripted) -> None:
    text = "a\u2028b\u2029c\u0085d\x0b\x0c\x1c"
    s.complete("Once", text)
    body = {"prompt": "Once", "temperature": 0, "max_tokens": 200, "stream": True}
    with s.http.stream("POST", "/v1/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    events = [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == text


def test_stream_options_are_done_or_refused(s: Scripted) -> None:
    s.complete("Once", "abcdef")
    body: dict[str, Any] = {"prompt": "Once", "temperature": 0, "max_tokens": 4}
    for path, more in (("/v1/completions", {}), ("/v1/completions", {"echo": True}), ("/v1/chat/completions", {})):
        chat = {"messages": [{"role": "user", "content": "go"}], "temperature": 0, "max_tokens": 4}
        mine = (chat if "chat" in path else body) | more
        events = s.events(path, mine | {"stream_options": {"continuous_usage_stats": True, "include_usage": True}})
        *parts, last = events
        assert [part["usage"]["completion_tokens"] for part in parts][-1] == 4 == last["usage"]["completion_tokens"]
        assert all(part["usage"]["total_tokens"] > part["usage"]["completion_tokens"] for part in parts)
        assert not any("usage" in event for event in s.events(path, mine))
        for wrong in ({"include_usgae": True}, {"include_obfuscation": True}, {"include_usage": 1}):
            assert s.post(path, mine | {"stream": True, "stream_options": wrong})["status"] == 400
        assert s.post(path, mine | {"stream_options": {"include_usage": True}})["status"] == 400
        assert s.post(path, mine | {"stream_options": {}})["status"] == 200


def test_prompts_of_sglang_have_an_entry_for_each_token(s: Scripted) -> None:
    ids = s.ids("A prompt")
    s.put({len(ids): s.ids("ok")})
    params = {"max_new_tokens": 2, "temperature": 0}
    for start in (0, 1, 5, len(ids)):
        body = {"text": "A prompt", "sampling_params": params, "return_logprob": True, "logprob_start_len": start}
        for stream in (False, True):
            wanted = body | {"top_logprobs_num": 1, "return_text_in_logprobs": True}
            answers = s.events("/generate", wanted) if stream else [s.post("/generate", wanted)]
            for meta in (answer["meta_info"] for answer in answers):
                rows = meta["input_token_logprobs"]
                assert [row[1] for row in rows] == ids[start:] and [row[0] is None for row in rows[:2]] == [True, False][
                    : len(rows)
                ]
                assert "".join(row[2] for row in rows) == "A prompt"[start:]
                assert len(meta["input_top_logprobs"]) == len(rows) and meta["output_top_logprobs"][0][0][1] == s.ids("o")[0]
    for wrong in ({"logprob_start_len": 99}, {"logprob_start_len": -2}, {"logprob_start_len": 0, "return_logprob": False}):
        assert s.post("/generate", body | wrong)["status"] == 400
    assert s.post("/generate", {"text": "A", "top_logprobs_num": 1})["status"] == 400


def test_prompt_tokens_have_ranks(s: Scripted) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "The quick", "max_tokens": 1}),
        ("/inference/v1/generate", {"token_ids": s.ids("The quick"), "sampling_params": {"max_tokens": 1}}),
    ):
        for most in (0, 3):
            where = body.get("sampling_params", body)
            where["prompt_logprobs"] = most
            answer = s.post(path, body)
            rows = answer["choices"][0].get("prompt_logprobs") or answer["prompt_logprobs"]
            for row, id in zip(rows[1:], s.ids("The quick")[1:], strict=True):
                assert row[str(id)]["rank"] >= 1 and most <= len(row) <= most + 1
                assert all(isinstance(entry["rank"], int) for entry in row.values())
