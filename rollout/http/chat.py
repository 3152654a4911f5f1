"""OpenAI's chat API and vLLM's tokenizer routes: `/v1/chat/completions`, `/tokenize`, `/detokenize`.

messages -> chat template -> ids (exact for earlier turns, see conversation.py) -> samples -> text, tool calls
"""

from __future__ import annotations

import secrets
import time
from contextlib import aclosing
from typing import Any, Literal

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.routing import Route

from rollout.client.token_text import visible
from rollout.engine.values import Sample
from rollout.http.conversation import (
    TokenIdCache,
    Tool,
    check_messages,
    check_shape,
    exact_ids,
    last_turn,
    template_messages,
)
from rollout.http.endpoints import Endpoints, EventStream, unless_disconnected
from rollout.http.errors import bad, not_served
from rollout.http.generation import Arrival, GenerationService, PromptGroup
from rollout.http.prompts import Conversation, Messages
from rollout.http.responses import (
    Contents,
    StreamUsage,
    Tokens,
    checked_stream_options,
    finish,
    id_name,
    top_tokens,
    usage,
    vllm_routes,
)
from rollout.http.sampling import top_logprobs_of
from rollout.http.text import between, characters
from rollout.http.tool_calls import BEGIN, THINKING, Call, find_calls
from rollout.http.vllm import VllmRequest, request_names, vllm_sampling

EncodedAgain = Literal["unknown", "template"]
"""unknown: the ids of the last turn are not stored, and its message has none; template: it does not render a turn as a prefix
of the next one"""
THOUGHT_TOKENS = 8
"""at the end of a prompt, in which a template may begin the model's thinking"""


class ChatRequest(VllmRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
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
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    service_tier: str | None = None
    # change no sample
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @property
    def with_tools(self) -> bool:
        """Whether responses are searched for tool calls."""
        return bool(self.tools) and self.tool_choice != "none"


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /tokenize: a prompt or messages."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    """of a prompt, true by default; a template writes its own"""
    add_generation_prompt: bool | None = None
    """of messages, true by default"""
    return_token_strs: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /detokenize."""

    tokens: list[int]
    model: str | None = None


class ChatIds(msgspec.Struct, frozen=True):
    """The ids of a conversation."""

    ids: list[int]
    exact: int
    """of them, at the start, that are those of its turns"""
    encoded_again: EncodedAgain | None
    """why an earlier turn was encoded again; None: there is none, or it was not"""
    tools_unseen: bool
    """the template does not write the tools"""

    def fields(self) -> dict[str, Any]:
        """Return the fields of a response that say how the prompt was made."""
        fields: dict[str, Any] = {"exact_prompt_tokens": self.exact}
        if self.encoded_again is not None:
            fields["encoded_again"] = self.encoded_again
        if self.tools_unseen:
            fields["tools_unseen"] = True
        return fields


class ChatPrompt(msgspec.Struct, frozen=True):
    """A conversation to continue."""

    session: str
    """of X-Session-ID"""
    messages: Messages
    """as the template expects them"""
    template: dict[str, Any]
    """arguments of the template besides the messages"""
    group: PromptGroup
    found: ChatIds


class ChatRoutes:
    """The routes, over one `GenerationService`."""

    def __init__(self, generation: GenerationService) -> None:
        self._generation, self._text = generation, generation.text
        self._cache = TokenIdCache()

    def routes(self, endpoints: Endpoints) -> list[Route]:
        return [
            endpoints.post("/v1/chat/completions", self.chat, ChatRequest),
            endpoints.post("/tokenize", self.tokenize, TokenizeRequest),
            endpoints.post("/detokenize", self.detokenize, DetokenizeRequest),
        ]

    async def chat(self, request: Request, body: ChatRequest) -> Any:
        """Sample the next message of a conversation."""
        generation = self._generation
        head: dict[str, Any] = {"created": int(time.time()), "model": generation.model(body.model)}
        refuse_unsupported(body)
        check_messages(body.messages, generation.limits)
        messages = template_messages(body.messages)
        template = self._template(body.chat_template_kwargs, body.tools if body.tool_choice != "none" else None)
        generation.prompts.check(messages, template)
        session = request.headers.get("x-session-id", "")
        head["id"], names = request_names(generation, "chatcmpl", body.request_id)
        with generation.arrival(names) as arrival:
            found = await unless_disconnected(request, self._ids(session, body.messages, messages, template))
            most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
            more = top_logprobs_of(body.top_logprobs or 0, "top_logprobs") | generation.streaming(body.stream)
            sampling = vllm_sampling(generation, body, body, len(found.ids), max_tokens=most, **more)
            group = generation.group(found.ids, sampling, names, body.text_options(BEGIN if body.with_tools else None))
            generation.check_samples([group])
            prompt = ChatPrompt(session, messages, template, group, found)
            if body.stream:
                head["object"] = "chat.completion.chunk"
                return EventStream(request, self._events(request, arrival, prompt, body, head))
            (samples,) = await generation.sample(request, arrival, [group])
        choices = [self._whole_choice(sample, prompt, body) for sample in samples]
        if body.return_token_ids:
            head["prompt_token_ids"] = found.ids
        head |= found.fields()
        return head | {"object": "chat.completion", "choices": choices, "usage": usage([group], samples)}

    async def _ids(self, session: str, given: Messages, messages: Messages, template: dict[str, Any]) -> ChatIds:
        """Return the ids of a conversation, exact as far as those of its turns are known. Raises HttpError."""
        turn = last_turn(messages)
        known = exact_ids(given[turn - 1]) if turn else None
        if known is None and turn:
            known = self._cache.find(session, messages[:turn], template)
        if known is None:
            job = Conversation(messages=messages, template=template)
        else:
            last = int(known[-1]) if len(known) else None
            job = Conversation(messages=messages, template=template, known=turn, last=last)
        found = await self._generation.prompts.conversation(job)
        exact = known.tolist() if found.rest and known is not None else []
        again: EncodedAgain | None = None if found.rest or not turn else "unknown" if known is None else "template"
        if turn:
            self._generation.meter.turns[again or "exact"] += 1
        return ChatIds([*exact, *found.ids[0]], len(exact), again, found.tools_unseen)

    def _template(self, given: dict[str, Any] | None, tools: list[dict[str, Any]] | None) -> dict[str, Any]:
        """Return the template's arguments besides the messages. Raises HttpError for one that would choose or control the
        template."""
        reserved = sorted(self._generation.prompts.reserved & (given or {}).keys())
        if reserved:
            raise bad(f"chat_template_kwargs.{reserved[0]}: is reserved; remove it", "chat_template_kwargs")
        return {**(given or {}), **({"tools": tools} if tools else {})}

    def _whole_choice(self, sample: Sample, prompt: ChatPrompt, body: ChatRequest) -> dict[str, Any]:
        """Make the choice of a finished sample, and store its ids for the next turn."""
        ids = sample.token_ids.tolist()
        content, calls = self._content(sample, prompt, body)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        choice: dict[str, Any] = {"index": sample.index, "message": message, "logprobs": self._logprobs(sample, body)}
        choice |= finish(prompt.group.sampling, sample, body.return_weight_versions)
        choice |= vllm_routes(sample, self._generation.upstream.info.routing, body)
        if calls:
            message["tool_calls"] = [call_field(call) for call in calls]
            choice["finish_reason"] = "tool_calls" if choice["finish_reason"] == "stop" else choice["finish_reason"]
        messages = [*prompt.messages, *template_messages([message])]
        self._cache.add(prompt.session, messages, prompt.template, np.concatenate([prompt.group.prompt, sample.token_ids]))
        if body.return_token_ids:
            choice["token_ids"] = message["generation_token_ids"] = ids
            message["prompt_token_ids"] = prompt.group.prompt.tolist()
            message["generation_log_probs"] = sample.logprobs.tolist()
        return choice

    def _content(self, sample: Sample, prompt: ChatPrompt, body: ChatRequest) -> tuple[str | None, list[Call]]:
        """Return the text of a message without its calls, and the calls. They are searched in the text with special tokens, of
        which some tokenizers make their tags, and with what ended the sample, which may be the end tag."""
        options, calls = body.text_options(), list[Call]()
        parts = self._text.parts(sample, True)
        shown = characters(self._text.parts(sample, options.keep_stop))
        if body.with_tools:
            start = self._text.decode(prompt.group.prompt[-THOUGHT_TOKENS:].tolist())
            calls = find_calls(visible(parts, False), body.tools or [], start.rstrip().endswith(THINKING[0]))
            calls = calls[:1] if body.parallel_tool_calls is False else calls
        borders = [0, *(border for call in calls for border in (call.start, call.end)), shown]
        texts = [
            visible(between(parts, start, min(end, shown)), options.skip_special is not False)
            for start, end in zip(borders[::2], borders[1::2], strict=True)
        ]
        # blanks separate calls, and are no text of the message
        content = texts[0] + "".join(text for text in texts[1:] if text.strip())
        return (content or None) if calls else content, calls

    def _logprobs(self, tokens: Tokens, body: ChatRequest) -> dict[str, Any] | None:
        if not body.logprobs:
            return None
        text = self._text
        name = id_name if body.return_tokens_as_token_ids else text.token

        def entry(id: int, logprob: float) -> dict[str, Any]:
            data = text.token_bytes(id)
            return {"token": name(id), "token_id": id, "logprob": logprob, "bytes": None if data is None else list(data)}

        rows = zip(tokens.token_ids.tolist(), tokens.logprobs.tolist(), top_tokens(tokens), strict=True)
        return {"content": [entry(id, logprob) | {"top_logprobs": [entry(*one) for one in top]} for id, logprob, top in rows]}

    async def _events(
        self, request: Request, arrival: Arrival, prompt: ChatPrompt, body: ChatRequest, head: dict[str, Any]
    ) -> Contents:
        """Yield the events of a stream. Text from the first tool call on is sent at the end, with the calls."""
        group, finished, counts = prompt.group, list[Sample](), StreamUsage(body.stream_options)
        sent: dict[int, int] = {}
        """characters that were sent, by choice"""
        async with aclosing(self._generation.stream(request, arrival, [group])) as chunks:
            async for chunk in chunks:
                event, delta = head, {"content": chunk.text}
                choice = {"index": chunk.index, "delta": delta, "logprobs": self._logprobs(chunk, body), "finish_reason": None}
                if body.return_token_ids:
                    choice["token_ids"] = chunk.ids
                if chunk.index not in sent:
                    delta["role"] = "assistant"
                    event = head | prompt.found.fields()
                    event |= {"prompt_token_ids": group.prompt.tolist()} if body.return_token_ids else {}
                before = sent.get(chunk.index, 0)
                sent[chunk.index] = before + len(chunk.text)
                if chunk.sample is not None:
                    finished.append(chunk.sample)
                    whole = self._whole_choice(chunk.sample, prompt, body)
                    delta |= last_delta(whole["message"], chunk.text, before)
                    choice |= {name: whole[name] for name in ENDS if name in whole}
                so_far = counts.so_far(len(group.prompt), chunk.first + len(chunk.token_ids))
                yield event | {"choices": [choice]} | so_far
        if counts.last:
            yield head | {"choices": [], "usage": usage([group], finished)}

    async def tokenize(self, request: Request, body: TokenizeRequest) -> dict[str, Any]:
        """Encode a prompt, or a conversation with the model's chat template."""
        generation, prompts = self._generation, self._generation.prompts
        generation.model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad("give either prompt or messages", "prompt")
        refuse_ineffective(body)
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            (ids,) = await unless_disconnected(request, prompts.texts([body.prompt], special, "prompt"))
        else:
            check_shape(body.tools or [], Tool, "tools")
            template = self._template(body.chat_template_kwargs, body.tools)
            given = body.messages or []
            check_messages(given, self._generation.limits)
            messages = template_messages(given)
            prompts.check(messages, template)
            job = Conversation(messages=messages, template=template, generate=body.add_generation_prompt is not False)
            (ids,) = (await unless_disconnected(request, prompts.conversation(job))).ids
        texts = self._text.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": generation.upstream.info.context, "tokens": ids, "token_strs": texts}

    async def detokenize(self, request: Request, body: DetokenizeRequest) -> dict[str, Any]:
        """Decode token ids."""
        self._generation.model(body.model)
        info = self._generation.upstream.info
        if len(body.tokens) > info.context:
            raise bad(f"{len(body.tokens)} tokens: at most {info.context}, the context of the model", "tokens")
        wrong = next((id for id in body.tokens if not 0 <= id < info.vocab_size), None)
        if wrong is not None:
            raise bad(f"tokens contains {wrong}: the model's token ids are 0 to {info.vocab_size - 1}", "tokens")
        return {"prompt": self._text.decode(body.tokens)}


def refuse_ineffective(body: TokenizeRequest) -> None:
    """Raise HttpError for a field of messages beside a prompt, and the other way round."""
    if body.prompt is None:
        if body.add_special_tokens:
            raise bad("add_special_tokens: the chat template writes special tokens; leave it out", "add_special_tokens")
        return
    for field in ("tools", "chat_template_kwargs", "add_generation_prompt"):
        if getattr(body, field) is not None:
            raise bad(f"{field} with a prompt: it is for messages; leave it out", field)


ENDS = ("finish_reason", "stop_reason", "weight_versions", "routed_experts")
"""fields of a choice that the last event of a stream has"""


def call_field(call: Call) -> dict[str, Any]:
    """Make the field of a message for a call."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function}


def refuse_unsupported(body: ChatRequest) -> None:
    """Raise HttpError for unsupported fields of a chat."""
    checked_stream_options(body.stream_options, body.stream)
    if body.top_logprobs and not body.logprobs:
        raise bad("top_logprobs without logprobs: set logprobs to true, or leave it out", "top_logprobs")
    if body.prompt_logprobs is not None:
        raise not_served("prompt_logprobs", "POST /v1/completions with the prompt's ids", "prompt_logprobs")
    if body.tool_choice not in (None, "auto", "none"):
        choice = f"tool_choice={body.tool_choice!r}"[:200]
        raise not_served(choice, "use auto, and search the response for a call", "tool_choice")
    if body.reasoning_effort is not None:
        instead = "leave it out, or set what the model's template reads, such as chat_template_kwargs.enable_thinking"
        raise not_served(f"reasoning_effort={body.reasoning_effort!r}"[:200], instead, "reasoning_effort")
    if body.service_tier not in (None, "auto", "default"):
        raise not_served(f"service_tier={body.service_tier!r}"[:200], "give priority, lower values first", "service_tier")
    if body.modalities not in (None, ["text"]):
        raise not_served(f"modalities={body.modalities!r}"[:200], "this service samples text only", "modalities")
    if body.continue_final_message:
        raise not_served("continue_final_message", "POST /v1/completions with the ids so far", "continue_final_message")
    if body.add_generation_prompt is False:
        raise not_served("add_generation_prompt=false", "POST /v1/completions with the ids so far", "add_generation_prompt")
    if body.chat_template is not None:
        raise not_served("chat_template", "render it yourself and POST /v1/completions with token ids", "chat_template")
    check_shape(body.tools or [], Tool, "tools")


def last_delta(message: dict[str, Any], text: str, before: int) -> dict[str, Any]:
    """Return the last part of a message: its last text, or its tool calls and the rest of the text around them.

    Args:
        text: new text.
        before: characters that were sent."""
    if "tool_calls" not in message:
        return {"content": text}
    calls = [call | {"index": i} for i, call in enumerate(message["tool_calls"])]
    return {"content": (message["content"] or "")[before:], "tool_calls": calls}
