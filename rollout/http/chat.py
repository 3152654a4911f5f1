"""`/v1/chat/completions`, `/tokenize` and `/detokenize`: text in and text out, through the model's chat template.

    messages -> template -> ids (earlier turns exact, see splice.py) -> service -> ids -> text, tool calls

Tool calls are read as most templates ask for them, <tool_call>{"name": …, "arguments": {…}}</tool_call>; other forms stay text.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from engine.types import Sample, Sampling
from rollout.http.data import FINISH, Data, as_id, events, json, stopped_by, tops, usage
from rollout.http.errors import bad, not_served
from rollout.http.frame import Route
from rollout.http.sampling import Draws, top_logprobs_of
from rollout.http.splice import Messages, Turns, last_turn, spliced, told_ids

TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.S)


class ChatRequest(Draws, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    model: str | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    response_format: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /tokenize: a prompt or messages."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /detokenize."""

    tokens: list[int]
    model: str | None = None


class Chat:
    """The routes, beside those of `Data`."""

    def __init__(self, data: Data) -> None:
        self._data, self._text, self._turns = data, data.text, Turns()
        self._chat = msgspec.json.Decoder(ChatRequest)
        self._tokenize = msgspec.json.Decoder(TokenizeRequest)
        self._detokenize = msgspec.json.Decoder(DetokenizeRequest)

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/chat/completions", self.chat),
            Route("POST", "/tokenize", self.tokenize),
            Route("POST", "/detokenize", self.detokenize),
        ]

    async def chat(self, request: Request) -> Response:
        asked = await self._data.bodies.decode(request, self._chat)
        name = self._data.name(asked.model)
        refuse(asked)
        messages, template = conversation(asked.messages), template_of(asked)
        session = request.headers.get("x-session-id", "")
        ids = self._ids(session, asked.messages, messages, template)
        asked.max_tokens = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
        more = top_logprobs_of(asked.top_logprobs or 0, "top_logprobs")
        group = self._data.group(ids, asked, None, asked.cache_salt, asked.priority, more)
        (samples,) = await self._data.sampled(request, [group])
        choices = []
        for sample in samples:
            choice = self._choice(sample, group, asked)
            kept = np.concatenate([group[0], sample.token_ids])
            self._turns.keep(session, [*messages, *conversation([choice["message"]])], template, kept)
            choices.append(choice)
        tokens = usage([group[0]], [samples])
        answer = {"id": self._data.id("chatcmpl"), "created": int(time.time()), "model": name}
        if asked.return_token_ids:
            answer["prompt_token_ids"] = ids
        if asked.stream:
            return stream(choices, answer, tokens, asked.stream_options)
        return json(answer | {"object": "chat.completion", "choices": choices, "usage": tokens})

    def _ids(self, session: str, given: Messages, messages: Messages, template: dict[str, Any]) -> list[int]:
        """Return the ids of a conversation, exact as far as its turns are known. Raises HttpError."""
        upto = last_turn(messages)
        if upto:
            known = told_ids(given[upto - 1])
            known = self._turns.find(session, messages[:upto], template) if known is None else known
            exact = None if known is None else spliced(self._text, messages, known, template)
            if exact is not None:
                return exact
        return self._text.encode(self._text.render(messages, add_generation_prompt=True, **template), special=False)

    def _choice(self, sample: Sample, group: tuple[np.ndarray, Sampling], asked: ChatRequest) -> dict[str, Any]:
        ids, logprobs = sample.token_ids.tolist(), sample.logprobs.tolist()
        text = self._text.of(sample, asked.skip_special_tokens, asked.include_stop_str_in_output)
        with_tools = bool(asked.tools) and asked.tool_choice != "none"
        content, calls = tool_calls(text) if with_tools else (text, [])
        message: dict[str, Any] = {"role": "assistant", "content": content}
        finish = FINISH.get(sample.finish_reason, "abort")
        if calls:
            message["tool_calls"] = calls
            finish = "tool_calls" if finish == "stop" else finish
        choice = {"index": sample.index, "message": message, "finish_reason": finish, **stopped_by(ids, group[1], sample)}
        choice |= {"logprobs": None, "weight_versions": sample.weight_versions}
        if asked.logprobs:
            named = as_id if asked.return_tokens_as_token_ids else self._text.token

            def entry(id: int, logprob: float) -> dict[str, Any]:
                return spelled(named(id), id, logprob)

            entries = [
                entry(id, logprob) | {"top_logprobs": [entry(*top) for top in likeliest]}
                for id, logprob, likeliest in zip(ids, logprobs, tops(sample), strict=True)
            ]
            choice["logprobs"] = {"content": entries}
        if asked.return_token_ids:
            choice["token_ids"] = ids
            exact = {"prompt_token_ids": group[0].tolist(), "generation_token_ids": ids, "generation_log_probs": logprobs}
            message |= exact
        return choice

    async def tokenize(self, request: Request) -> Response:
        asked = await self._data.bodies.decode(request, self._tokenize)
        self._data.name(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise bad("give prompt or messages, one of the two", "prompt")
        if asked.prompt is not None:
            ids = self._text.encode(asked.prompt, asked.add_special_tokens)
        else:
            template = {**(asked.chat_template_kwargs or {}), "tools": asked.tools}
            messages = conversation(asked.messages or [])
            written = self._text.render(messages, add_generation_prompt=asked.add_generation_prompt, **template)
            ids = self._text.encode(written, special=False)
        answer = {"count": len(ids), "max_model_len": self._data.upstream.info.context, "tokens": ids}
        return json(answer | {"token_strs": [self._text.token(id) for id in ids] if asked.return_token_strs else None})

    async def detokenize(self, request: Request) -> Response:
        asked = await self._data.bodies.decode(request, self._detokenize)
        self._data.name(asked.model)
        vocab = self._data.upstream.info.vocab_size
        wrong = next((id for id in asked.tokens if not 0 <= id < vocab), None)
        if wrong is not None:
            raise bad(f"tokens holds {wrong}: the model's token ids are 0 to {vocab - 1}", "tokens")
        return json({"prompt": self._text.decode(asked.tokens, skip_special=False)})


def spelled(token: str, id: int, logprob: float) -> dict[str, Any]:
    return {"token": token, "token_id": id, "logprob": logprob, "bytes": list(token.encode())}


def refuse(asked: ChatRequest) -> None:
    """Raise HttpError for what a chat cannot be asked here."""
    if asked.prompt_logprobs is not None:
        raise not_served("prompt_logprobs", "POST /v1/completions with the prompt's ids", "prompt_logprobs")
    if asked.tool_choice not in (None, "auto", "none"):
        raise not_served(
            f"tool_choice={asked.tool_choice!r}"[:200], "give auto, and look for a call in the answer", "tool_choice"
        )
    if asked.response_format not in (None, {"type": "text"}):
        raise not_served("response_format", "ask in the prompt, and check the text", "response_format")
    if asked.continue_final_message:
        raise not_served("continue_final_message", "POST /v1/completions with the ids so far", "continue_final_message")
    if asked.add_generation_prompt is False:
        raise not_served("add_generation_prompt=false", "POST /v1/completions with the ids so far", "add_generation_prompt")
    if asked.chat_template is not None:
        raise not_served("chat_template", "render it yourself and POST /v1/completions with token ids", "chat_template")
    for tool in asked.tools or []:
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad("tools: each must be {type: function, function: {name, …}}", "tools")


def template_of(asked: ChatRequest) -> dict[str, Any]:
    """Return what the template is told besides the messages."""
    template = dict(asked.chat_template_kwargs or {})
    taken = sorted(
        {"add_generation_prompt", "tokenize", "messages", "conversation", "chat_template", "tools"} & template.keys()
    )
    if taken:
        raise bad(f"chat_template_kwargs.{taken[0]}: not to be set here", "chat_template_kwargs")
    return template | ({"tools": asked.tools} if asked.tools and asked.tool_choice != "none" else {})


def conversation(messages: Messages) -> Messages:
    """Return messages as templates want them: contents as text, arguments of calls as objects. Raises HttpError."""
    if not messages:
        raise bad("messages is empty", "messages")
    return [templated(message) for message in messages]


def templated(message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise bad("messages: each must have a role", "messages")
    exact = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
    message = {name: value for name, value in message.items() if name not in exact}
    content = message.get("content")
    if isinstance(content, list):
        if any(not isinstance(part, dict) or not isinstance(part.get("text"), str) for part in content):
            raise not_served("content that is no text", "the service samples text only", "messages")
        message["content"] = "".join(part["text"] for part in content)
    elif content is not None and not isinstance(content, str):
        raise bad("messages: content must be text, a list of parts or null", "messages")
    if message.get("tool_calls"):
        message["tool_calls"] = [with_object(call) for call in message["tool_calls"]]
    return message


def with_object(call: Any) -> dict[str, Any]:
    """Return a tool call whose arguments are an object, as templates write them. Raises HttpError."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad("tool_calls: each must be {id, type: function, function: {name, arguments}}", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except msgspec.DecodeError:
            raise bad(f"tool_calls: the arguments of {function['name'][:100]!r} are no JSON", "messages") from None
    return {**call, "function": {**function, "arguments": arguments}}


def tool_calls(text: str) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the text before the first tool call, and the calls. Where one is no JSON the text stays whole."""
    calls: list[dict[str, Any]] = []
    for found in TOOL_CALL.finditer(text):
        try:
            call = msgspec.json.decode(found[1])
        except msgspec.DecodeError:
            return text, []
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return text, []
        arguments = msgspec.json.encode(call.get("arguments", {})).decode()
        function = {"name": call["name"], "arguments": arguments}
        calls.append({"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function})
    return (text[: text.index("<tool_call>")].strip() or None, calls) if calls else (text, [])


def stream(
    choices: list[dict[str, Any]], answer: dict[str, Any], tokens: dict[str, int], options: dict[str, Any] | None
) -> Response:
    """Answer with chunks: each choice's message, then its end."""
    head = answer | {"object": "chat.completion.chunk"}
    chunks = []
    for choice in choices:
        message = dict(choice["message"])
        if "tool_calls" in message:
            message["tool_calls"] = [call | {"index": i} for i, call in enumerate(message["tool_calls"])]
        first = {name: value for name, value in choice.items() if name not in ("message", "finish_reason", "stop_reason")}
        last = {
            "index": choice["index"],
            "delta": {},
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
        }
        chunks += [head | {"choices": [first | {"delta": message, "finish_reason": None}]}, head | {"choices": [last]}]
    return events(chunks, head, tokens, options)
