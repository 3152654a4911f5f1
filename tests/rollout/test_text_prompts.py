"""Prompts of text and of messages, and the texts of samples. The ids are those that the model's own tokenizer gives."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout import AsyncRolloutClient, InvalidRequest, NoTokenizer, RolloutClient, Sample, Sampling
from rollout.client.text import TextCodec
from rollout.transport.loopback import LoopbackService
from tests.support.fake_engine import FakeEngine
from tests.support.wire import serving

WAIT = 60.0
"""for what comes: a bound for hangs only"""
SHORT = Sampling(max_tokens=3, seed=1)
CHAT = [{"role": "user", "content": "6 x 7?"}]
THINKS = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{% if loop.last and m['role'] == 'assistant' %}think{% endif %}"
    "{{ m['content'] }}</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
"""writes the last turn in another way than earlier ones, as those of reasoning models do"""


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def end() -> Iterator[LoopbackService]:
    end = LoopbackService()
    with serving(FakeEngine(), end):
        yield end


@pytest.fixture(scope="module")
def client(tiny_model: Path, end: LoopbackService) -> Iterator[RolloutClient]:
    with RolloutClient(transport=end.connect(), tokenizer=tiny_model) as client:
        yield client


def prompt_of(handle: Any) -> list[int]:
    assert handle.result(WAIT)
    return handle.group.prompt.tolist()


def sample(ids: list[int], reason: Any = "stop", **fields: Any) -> Sample:
    values = {"token_ids": np.array(ids, np.int32), "logprobs": np.full(len(ids), -0.5, np.float32)}
    return Sample(group_id="g", index=0, finish_reason=reason, weight_versions=[(0, 3)], prompt_tokens=2, **values, **fields)


def test_text_and_messages_become_the_ids_of_the_model_s_tokenizer(client: RolloutClient, tokenizer: Any) -> None:
    text, chat = tokenizer("6 x 7?")["input_ids"], tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert text != chat and client.encode("6 x 7?") == text and client.encode(CHAT) == chat
    assert prompt_of(client.submit("6 x 7?", SHORT)) == text and prompt_of(client.submit(CHAT, SHORT)) == chat
    assert prompt_of(client.submit(text, SHORT)) == text, "ids stay as they are"
    lengths = [len(text), len(chat), len(text)]
    for prompts, wanted in ((["6 x 7?", CHAT, text], lengths), ("6 x 7?", lengths[:1]), (CHAT, lengths[1:2])):
        assert [group[0].prompt_tokens for group in client.generate_groups(prompts, SHORT, timeout=WAIT)] == wanted
        assert sorted(each.prompt_tokens for each in client.generate(prompts, SHORT, timeout=WAIT)) == sorted(wanted)
    assert client.encode(CHAT, add_generation_prompt=False) == tokenizer.apply_chat_template(CHAT)["input_ids"]
    with pytest.raises(InvalidRequest, match="tools=…: leave it out"):
        client.encode("6 x 7?", tools=[])
    with pytest.raises(InvalidRequest, match="one message; give a list of messages"):
        client.submit(CHAT[0])  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="a list is not a Sample: decode token ids with client.tokenizer.decode"):
        client.decode(text)


def test_a_turn_of_messages_is_the_conversation_that_the_template_writes(client: RolloutClient, tokenizer: Any) -> None:
    before, more = client.encode(CHAT), [{"role": "user", "content": "And 7 x 8?"}]
    answer = [*tokenizer("42", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    whole = client.encode([*CHAT, {"role": "assistant", "content": "42"}, *more])
    ended = msgspec.structs.replace(sample(answer), prompt_tokens=len(before))
    cut = msgspec.structs.replace(ended, finish_reason="length", token_ids=ended.token_ids[:-1], logprobs=ended.logprobs[:-1])
    for turn in (ended, cut):  # one has the token that ends its message, the other gets it
        assert prompt_of(client.next_turn(turn, CHAT, SHORT, append=more)) == whole
        assert prompt_of(client.next_turn(turn, before, SHORT, append=more)) == whole
    assert prompt_of(client.next_turn(cut, CHAT, SHORT, append=" sure?")) == [*before, *answer[:-1], *client.encode(" sure?")]
    with pytest.raises(InvalidRequest, match="a turn continues one sample"):
        client.next_turn([cut], CHAT, SHORT, append=more)  # type: ignore[arg-type]


def test_templates_that_write_the_last_turn_in_another_way(tokenizer: Any, tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(tiny_model)
    other.chat_template = THINKS
    text = other.decode(TextCodec(other, lambda: "").next_ids(sample([52, 2]), CHAT))
    assert text == "\n<s>user\n6 x 7?</s>\n<s>assistant\n", "the message's end is there already"
    other.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidRequest, match="the chat template refused the messages: roles must alternate"):
        TextCodec(other, lambda: "").ids(CHAT)
    other.chat_template = "{% for m in messages %}{{ m['content'] | lower }}{% endfor %}"
    with pytest.raises(InvalidRequest, match="give append as token ids"):
        TextCodec(other, lambda: "").next_ids(sample([52, 2]), CHAT)


def test_texts_are_scored(client: RolloutClient, tokenizer: Any) -> None:
    handle = client.submit_score("6 x 7?", ["42", [50, 51]])
    handle.cancel()
    encoded = tokenizer("42", add_special_tokens=False)["input_ids"]
    assert [child.token_ids.tolist() for child in handle.group.partials] == [encoded, [50, 51]]
    with pytest.raises(InvalidRequest, match="completions='42': give a list for each prompt"):
        client.score(["6 x 7?"], ["42"])


def test_samples_have_their_text(client: RolloutClient, tokenizer: Any) -> None:
    ids = [*tokenizer("Yes.\n\nNo", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert client.decode(sample(ids)) == "Yes.\n\nNo" and client.decode(sample(ids), skip_special=False) == "Yes.\n\nNo</s>"
    stopped = sample(ids[:6], stopped_by="\n\n", text_end=4)
    assert client.decode(stopped) == "Yes." and client.decode(stopped, keep_stop=True) == "Yes.\n\n"


def test_without_a_tokenizer_there_are_ids_only(end: LoopbackService, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is loaded when it is needed. The service's model is "fake", of which this host has no folder."""
    for tokenizer, missing in ((None, "'fake'"), ("/nowhere", "'/nowhere'")):
        with RolloutClient(transport=end.connect(), tokenizer=tokenizer) as client:
            assert client.submit([5], SHORT).result(WAIT)
            for wants in (lambda: client.submit("x"), lambda: client.submit(CHAT), lambda: client.decode(sample([5]))):  # noqa: B023
                with pytest.raises(NoTokenizer, match=f"model {missing} on this host.*RolloutClient.tokenizer=…. its folder"):
                    wants()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with RolloutClient(transport=end.connect()) as client:
        assert client.submit([5], SHORT).result(WAIT)
        with pytest.raises(NoTokenizer, match="transformers is not installed: pip install .*, or give token ids"):
            client.submit("x")


def test_the_tokenizer_is_that_of_the_service_s_model(tiny_model: Path, tokenizer: Any) -> None:
    engine, end = FakeEngine(), LoopbackService()
    engine.model.name = str(tiny_model)
    with serving(engine, end), RolloutClient(transport=end.connect()) as client:
        assert client.encode("6 x 7?") == tokenizer("6 x 7?")["input_ids"]
        assert client.tokenizer is client.tokenizer and client.tokenizer.name_or_path == str(tiny_model)
    with serving(engine, other := LoopbackService()), RolloutClient(transport=other.connect(), tokenizer=tokenizer) as client:
        assert client.tokenizer is tokenizer


def test_tasks_of_a_loop_give_text_too(end: LoopbackService, tiny_model: Path, client: RolloutClient) -> None:
    async def converse() -> None:
        async with AsyncRolloutClient(transport=end.connect(), tokenizer=tiny_model) as tasks:
            assert repr(tasks).startswith("AsyncRolloutClient(") and tasks.encode(CHAT) == client.encode(CHAT)
            handle = tasks.submit(CHAT, SHORT)
            (first,) = await handle
            assert handle.group.prompt.tolist() == client.encode(CHAT) and repr(handle).startswith("AsyncHandle('#0' 1 of 1")
            turn = tasks.next_turn(first, CHAT, SHORT, append=" sure?")
            assert turn.group.prompt.tolist()[-6:] == client.encode(" sure?") and len(await turn) == 1
            async for sample in tasks.generate(["6 x 7?", CHAT], SHORT, timeout=WAIT):
                assert tasks.decode(sample) == client.decode(sample)
            assert [group[0].prompt_tokens async for group in tasks.generate_groups("6 x 7?", SHORT)] == [len("6 x 7?")]

    asyncio.run(asyncio.wait_for(converse(), WAIT))
