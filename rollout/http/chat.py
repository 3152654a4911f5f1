"""`/v1/chat/completions`, `/tokenize` and `/detokenize`: text in and text out, through the model's chat template.

    messages -> template -> ids (earlier turns exact, see splice.py) -> service -> ids -> text, tool calls

Tool calls are read as most templates ask for them, <tool_call>{"name": …, "arguments": {…}}</tool_call>; other forms stay text.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Collection
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from engine.types import Sample, Sampling, TokenChunk
from rollout.http.answers import as_id, ending, json, tops, usage
from rollout.http.app import Answer, EventStream, Route, unless_gone
from rollout.http.data import CompletionRoutes, Group, name_of
from rollout.http.errors import NO_JSON, bad, not_served
from rollout.http.prompts import Conversation, Messages
from rollout.http.sampling import VllmSampling, top_logprobs_of
from rollout.http.streams import Contents, counted, wants_usage
from rollout.http.text_stream import TextOptions
from rollout.http.token_id_cache import TokenIdCache, last_turn, told_ids

CALL = "<tool_call>"
"""begins one"""
TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.S)

Keep = Callable[[dict[str, Any], Sample], None]


class ChatRequest(VllmSampling, kw_only=True, forbid_unknown_fields=True):
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


class Function(msgspec.Struct):
    """What a tool is called, and with what. What else it has is the template's."""

    name: str
    arguments: Any = None


class Tool(msgspec.Struct):
    """A tool, or a call of one."""

    function: Function


class Message(msgspec.Struct):
    """What every message must be like, whatever else the template reads of it."""

    role: str
    content: str | list[Any] | None = None
    tool_calls: list[Tool] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /detokenize."""

    tokens: list[int]
    model: str | None = None


class Chat:
    """The routes, beside those of `CompletionRoutes`."""

    def __init__(self, data: CompletionRoutes) -> None:
        self.data, self._text, self._turns = data, data.text, TokenIdCache()
        self._chat = msgspec.json.Decoder(ChatRequest)
        self._tokenize = msgspec.json.Decoder(TokenizeRequest)
        self._detokenize = msgspec.json.Decoder(DetokenizeRequest)

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/chat/completions", self.chat),
            Route("POST", "/tokenize", self.tokenize),
            Route("POST", "/detokenize", self.detokenize),
        ]

    async def chat(self, request: Request) -> Answer:
        asked = await self.data.bodies.decode(request, self._chat)
        name = self.data.name(asked.model)
        refuse(asked)
        messages = conversation(asked.messages)
        template = self._template(asked.chat_template_kwargs, asked.tools if asked.tool_choice != "none" else None)
        self.data.prompts.check(messages, template)
        session = request.headers.get("x-session-id", "")
        ids = await unless_gone(request, self._ids(session, asked.messages, messages, template))
        asked.max_tokens = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
        more = top_logprobs_of(asked.top_logprobs or 0, "top_logprobs") | self.data.streaming(bool(asked.stream))
        group = self.data.group(ids, asked, None, asked.cache_salt, asked.priority, more)
        self.data.check_samples([group])
        given = name_of(asked.request_id)
        names = {id := f"chatcmpl-{given}" if given else self.data.id("chatcmpl"), *([given] if given else [])}
        answer = {"id": id, "created": int(time.time()), "model": name}

        def keep(message: dict[str, Any], sample: Sample) -> None:
            whole = np.concatenate([group[0], sample.token_ids])
            self._turns.keep(session, [*messages, *conversation([message])], template, whole)

        if asked.stream:
            return EventStream(request, chat_events(self, group, asked, answer, names, keep))
        (samples,) = await self.data.sampled(request, [group], [names])
        choices = [self.choice(sample, group, asked) for sample in samples]
        for choice, sample in zip(choices, samples, strict=True):
            keep(choice["message"], sample)
        if asked.return_token_ids:
            answer["prompt_token_ids"] = ids
        tokens = usage([group[0]], [samples])
        return json(answer | {"object": "chat.completion", "choices": choices, "usage": tokens})

    async def _ids(self, session: str, given: Messages, messages: Messages, template: dict[str, Any]) -> list[int]:
        """Return the ids of a conversation, exact as far as its turns are known. Raises HttpError."""
        upto = last_turn(messages)
        known = told_ids(given[upto - 1]) if upto else None
        if known is None and upto:
            known = self._turns.find(session, messages[:upto], template)
        if known is None:
            job = Conversation(messages=messages, template=template)
        else:
            last = int(known[-1]) if len(known) else None
            job = Conversation(messages=messages, template=template, upto=upto, last=last)
        found = await self.data.prompts.conversation(job)
        return [*known.tolist(), *found.ids[0]] if found.behind and known is not None else found.ids[0]

    def _template(self, given: dict[str, Any] | None, tools: list[dict[str, Any]] | None) -> dict[str, Any]:
        """Return what the template gets besides the messages. Raises HttpError for what says which template it is, or how it is
        called."""
        taken = sorted(self.data.prompts.reserved & (given or {}).keys())
        if taken:
            raise bad(f"chat_template_kwargs.{taken[0]}: not to be set here", "chat_template_kwargs")
        return {**(given or {}), **({"tools": tools} if tools else {})}

    def choice(self, sample: Sample, group: tuple[np.ndarray, Sampling], asked: ChatRequest) -> dict[str, Any]:
        """Describe a whole sample."""
        ids, logprobs = sample.token_ids.tolist(), sample.logprobs.tolist()
        text = self._text.of(sample, asked.skip_special_tokens, asked.include_stop_str_in_output)
        content, calls = tool_calls(text) if with_tools(asked) else (text, [])
        message: dict[str, Any] = {"role": "assistant", "content": content}
        choice = {"index": sample.index, "message": message, "logprobs": None, **ending(ids, group[1], sample)}
        if calls:
            message["tool_calls"] = calls
            choice["finish_reason"] = "tool_calls" if choice["finish_reason"] == "stop" else choice["finish_reason"]
        if asked.logprobs:
            choice["logprobs"] = {"content": self.entries(ids, sample, asked)}
        if asked.return_token_ids:
            choice["token_ids"] = ids
            exact = {"prompt_token_ids": group[0].tolist(), "generation_token_ids": ids, "generation_log_probs": logprobs}
            message |= exact
        return choice

    def entries(self, ids: list[int], tokens: Sample | TokenChunk, asked: ChatRequest) -> list[dict[str, Any]]:
        """List log-probs of tokens."""
        named = as_id if asked.return_tokens_as_token_ids else self._text.token

        def entry(id: int, logprob: float) -> dict[str, Any]:
            return spelled(named(id), id, logprob)

        return [
            entry(id, logprob) | {"top_logprobs": [entry(*top) for top in likeliest]}
            for id, logprob, likeliest in zip(ids, tokens.logprobs.tolist(), tops(tokens), strict=True)
        ]

    async def tokenize(self, request: Request) -> Response:
        asked = await self.data.bodies.decode(request, self._tokenize)
        self.data.name(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise bad("give prompt or messages, one of the two", "prompt")
        if asked.prompt is not None:
            work = self.data.prompts.texts([asked.prompt], asked.add_special_tokens, "prompt")
            (ids,) = await unless_gone(request, work)
        else:
            shaped(asked.tools or [], Tool, "tools")
            template = self._template(asked.chat_template_kwargs, asked.tools)
            messages = conversation(asked.messages or [])
            self.data.prompts.check(messages, template)
            job = Conversation(messages=messages, template=template, generate=asked.add_generation_prompt)
            (ids,) = (await unless_gone(request, self.data.prompts.conversation(job))).ids
        answer = {"count": len(ids), "max_model_len": self.data.upstream.info.context, "tokens": ids}
        return json(answer | {"token_strs": [self._text.token(id) for id in ids] if asked.return_token_strs else None})

    async def detokenize(self, request: Request) -> Response:
        asked = await self.data.bodies.decode(request, self._detokenize)
        self.data.name(asked.model)
        vocab, most = self.data.upstream.info.vocab_size, self.data.upstream.info.context
        if len(asked.tokens) > most:
            raise bad(f"{len(asked.tokens)} tokens: at most {most}, the context of the model", "tokens")
        wrong = next((id for id in asked.tokens if not 0 <= id < vocab), None)
        if wrong is not None:
            raise bad(f"tokens holds {wrong}: the model's token ids are 0 to {vocab - 1}", "tokens")
        return json({"prompt": self._text.decode(asked.tokens, skip_special=False)})


def with_tools(asked: ChatRequest) -> bool:
    """Whether calls are looked for in the answer."""
    return bool(asked.tools) and asked.tool_choice != "none"


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
    shaped(asked.tools or [], Tool, "tools")


def shaped(given: list[dict[str, Any]], kind: type[Any], param: str) -> None:
    """Raise HttpError, naming the field, for a list whose entries are not of a kind."""
    try:
        msgspec.convert(given, list[kind])  # type: ignore[valid-type]
    except msgspec.ValidationError as error:
        raise bad(f"{param}: {error}", param) from None


def conversation(messages: Messages) -> Messages:
    """Return messages as templates want them: contents as text, arguments of calls as objects. Raises HttpError."""
    if not messages:
        raise bad("messages is empty", "messages")
    shaped(messages, Message, "messages")
    return [templated(message) for message in messages]


def templated(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message, which has the shape of one, as templates want it. Raises HttpError."""
    exact = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
    message = {name: value for name, value in message.items() if name not in exact}
    content = message.get("content")
    if isinstance(content, list):
        if any(not isinstance(part, dict) or not isinstance(part.get("text"), str) for part in content):
            raise not_served("content that is no text", "the service samples text only", "messages")
        message["content"] = "".join(part["text"] for part in content)
    if message.get("tool_calls"):
        message["tool_calls"] = [with_object(call) for call in message["tool_calls"]]
    return message


def with_object(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call whose arguments are an object, as templates write them. Raises HttpError."""
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except NO_JSON:
            raise bad(f"tool_calls: the arguments of {function['name'][:100]!r} are no JSON", "messages") from None
    return {**call, "function": {**function, "arguments": arguments}}


def tool_calls(text: str) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the text before the first tool call, and the calls. Where one is no JSON the text stays whole."""
    calls: list[dict[str, Any]] = []
    for found in TOOL_CALL.finditer(text):
        try:
            call = msgspec.json.decode(found[1])
        except NO_JSON:
            return text, []
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return text, []
        arguments = msgspec.json.encode(call.get("arguments", {})).decode()
        function = {"name": call["name"], "arguments": arguments}
        calls.append({"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function})
    return (text[: text.index(CALL)] or None, calls) if calls else (text, [])


async def chat_events(
    chat: Chat, group: Group, asked: ChatRequest, head: dict[str, Any], names: Collection[str], keep: Keep
) -> Contents:
    """Yield the events of /v1/chat/completions. Text from the first tool call on is told at the end, as calls. `keep`: called
    with each message that is whole."""
    data = chat.data
    head = head | {"object": "chat.completion.chunk"}
    spelling = TextOptions(
        skip_special=asked.skip_special_tokens,
        keep_stop=asked.include_stop_str_in_output,
        marker=CALL if with_tools(asked) else None,
    )
    ended: list[Sample] = []
    told: dict[int, int] = {}
    """characters of each choice's message"""
    async with aclosing(data.children([group], [spelling], [names])) as new:
        async for piece in new:
            delta: dict[str, Any] = {} if piece.index in told else {"role": "assistant"}
            before = told.get(piece.index, 0)
            told[piece.index] = before + len(piece.text)
            choice = {"index": piece.index, "delta": delta, "finish_reason": None, "logprobs": None}
            if asked.logprobs:
                choice["logprobs"] = {"content": chat.entries(piece.ids, piece.tokens, asked)}
            if asked.return_token_ids:
                choice["token_ids"] = piece.ids
            if piece.sample is None:
                delta["content"] = piece.text
            else:
                ended.append(piece.sample)
                whole = chat.choice(piece.sample, group, asked)
                keep(whole["message"], piece.sample)
                delta |= last_delta(whole["message"], piece.text, before)
                choice |= {name: whole[name] for name in ("finish_reason", "stop_reason", "weight_versions")}
            first = {"prompt_token_ids": group[0].tolist()} if "role" in delta and asked.return_token_ids else {}
            yield head | first | {"choices": [choice]}
    if wants_usage(asked.stream_options):
        yield head | counted([group], ended)


def last_delta(message: dict[str, Any], text: str, before: int) -> dict[str, Any]:
    """Make the end of a message: its last text, or its tool calls behind the text in front of them, of which `before`
    characters were told."""
    if "tool_calls" not in message:
        return {"content": text}
    calls = [call | {"index": i} for i, call in enumerate(message["tool_calls"])]
    return {"content": (message["content"] or "")[before:], "tool_calls": calls}
