"""OpenAI's chat API and vLLM's tokenizer routes: `/v1/chat/completions`, `/tokenize`, `/detokenize`.

messages -> chat template -> ids (exact for earlier turns, see conversation.py) -> samples -> text, tool calls
"""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.routing import Route

from rollout.engine.types import Sample
from rollout.http.conversation import (
    CALL,
    TokenIdCache,
    Tool,
    check_shape,
    exact_ids,
    last_turn,
    template_messages,
    tool_calls,
)
from rollout.http.endpoints import Endpoints, EventStream, unless_disconnected
from rollout.http.errors import bad, not_served
from rollout.http.generation import GenerationService, PromptGroup
from rollout.http.prompts import Conversation, Messages
from rollout.http.responses import Contents, Tokens, finish, id_name, top_tokens, usage, vllm_routes, wants_usage
from rollout.http.sampling import top_logprobs_of
from rollout.http.vllm import VllmRequest, request_names, vllm_sampling


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
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /detokenize."""

    tokens: list[int]
    model: str | None = None


class ChatPrompt(msgspec.Struct, frozen=True):
    """A conversation to continue."""

    session: str
    """of X-Session-ID"""
    messages: Messages
    """as the template expects them"""
    template: dict[str, Any]
    """arguments of the template besides the messages"""
    group: PromptGroup


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
        messages = template_messages(body.messages)
        template = self._template(body.chat_template_kwargs, body.tools if body.tool_choice != "none" else None)
        generation.prompts.check(messages, template)
        session = request.headers.get("x-session-id", "")
        ids = await unless_disconnected(request, self._ids(session, body.messages, messages, template))
        head["id"], names = request_names(generation, "chatcmpl", body.request_id)
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        more = top_logprobs_of(body.top_logprobs or 0, "top_logprobs") | generation.streaming(body.stream)
        sampling = vllm_sampling(generation, body, body, len(ids), max_tokens=most, **more)
        group = generation.group(ids, sampling, names, body.text_options(CALL if body.with_tools else None))
        generation.check_samples([group])
        prompt = ChatPrompt(session, messages, template, group)
        if body.stream:
            return EventStream(request, self._events(request, prompt, body, head | {"object": "chat.completion.chunk"}))
        (samples,) = await generation.sample(request, [group])
        choices = [self._whole_choice(sample, prompt, body) for sample in samples]
        if body.return_token_ids:
            head["prompt_token_ids"] = ids
        return head | {"object": "chat.completion", "choices": choices, "usage": usage([group], samples)}

    async def _ids(self, session: str, given: Messages, messages: Messages, template: dict[str, Any]) -> list[int]:
        """Return the ids of a conversation, exact as far as those of its turns are known. Raises HttpError."""
        known_messages = last_turn(messages)
        known = exact_ids(given[known_messages - 1]) if known_messages else None
        if known is None and known_messages:
            known = self._cache.find(session, messages[:known_messages], template)
        if known is None:
            job = Conversation(messages=messages, template=template)
        else:
            last = int(known[-1]) if len(known) else None
            job = Conversation(messages=messages, template=template, known=known_messages, last=last)
        found = await self._generation.prompts.conversation(job)
        return [*known.tolist(), *found.ids[0]] if found.rest and known is not None else found.ids[0]

    def _template(self, given: dict[str, Any] | None, tools: list[dict[str, Any]] | None) -> dict[str, Any]:
        """Return the template's arguments besides the messages. Raises HttpError for one that would choose or control the
        template."""
        reserved = sorted(self._generation.prompts.reserved & (given or {}).keys())
        if reserved:
            raise bad(f"chat_template_kwargs.{reserved[0]}: is reserved; remove it", "chat_template_kwargs")
        return {**(given or {}), **({"tools": tools} if tools else {})}

    def _whole_choice(self, sample: Sample, prompt: ChatPrompt, body: ChatRequest) -> dict[str, Any]:
        """Make the choice of a finished sample, and store its ids for the next turn."""
        ids, options = sample.token_ids.tolist(), body.text_options()
        text = self._text.of(sample, options.skip_special, options.keep_stop)
        content, calls = tool_calls(text) if body.with_tools else (text, [])
        message: dict[str, Any] = {"role": "assistant", "content": content}
        choice: dict[str, Any] = {"index": sample.index, "message": message, "logprobs": self._logprobs(sample, body)}
        choice |= finish(prompt.group.sampling, sample)
        choice |= vllm_routes(sample, self._generation.upstream.info.routing, body)
        if calls:
            message["tool_calls"] = calls
            choice["finish_reason"] = "tool_calls" if choice["finish_reason"] == "stop" else choice["finish_reason"]
        messages = [*prompt.messages, *template_messages([message])]
        self._cache.add(prompt.session, messages, prompt.template, np.concatenate([prompt.group.prompt, sample.token_ids]))
        if body.return_token_ids:
            choice["token_ids"] = message["generation_token_ids"] = ids
            message["prompt_token_ids"] = prompt.group.prompt.tolist()
            message["generation_log_probs"] = sample.logprobs.tolist()
        return choice

    def _logprobs(self, tokens: Tokens, body: ChatRequest) -> dict[str, Any] | None:
        if not body.logprobs:
            return None
        name = id_name if body.return_tokens_as_token_ids else self._text.token

        def entry(id: int, logprob: float) -> dict[str, Any]:
            token = name(id)
            return {"token": token, "token_id": id, "logprob": logprob, "bytes": list(token.encode())}

        rows = zip(tokens.token_ids.tolist(), tokens.logprobs.tolist(), top_tokens(tokens), strict=True)
        return {"content": [entry(id, logprob) | {"top_logprobs": [entry(*one) for one in top]} for id, logprob, top in rows]}

    async def _events(self, request: Request, prompt: ChatPrompt, body: ChatRequest, head: dict[str, Any]) -> Contents:
        """Yield the events of a stream. Text from the first tool call on is sent at the end, as calls."""
        group, finished = prompt.group, list[Sample]()
        sent: dict[int, int] = {}
        """characters that were sent, by choice"""
        async with aclosing(self._generation.stream(request, [group])) as chunks:
            async for chunk in chunks:
                event, delta = head, {"content": chunk.text}
                choice = {"index": chunk.index, "delta": delta, "logprobs": self._logprobs(chunk, body), "finish_reason": None}
                if body.return_token_ids:
                    choice["token_ids"] = chunk.ids
                if chunk.index not in sent:
                    delta["role"] = "assistant"
                    event = head | ({"prompt_token_ids": group.prompt.tolist()} if body.return_token_ids else {})
                before = sent.get(chunk.index, 0)
                sent[chunk.index] = before + len(chunk.text)
                if chunk.sample is not None:
                    finished.append(chunk.sample)
                    whole = self._whole_choice(chunk.sample, prompt, body)
                    delta |= last_delta(whole["message"], chunk.text, before)
                    choice |= {name: whole[name] for name in ("finish_reason", "stop_reason", "weight_versions")}
                yield event | {"choices": [choice]}
        if wants_usage(body.stream_options):
            yield head | {"choices": [], "usage": usage([group], finished)}

    async def tokenize(self, request: Request, body: TokenizeRequest) -> dict[str, Any]:
        """Encode a prompt, or a conversation with the model's chat template."""
        generation, prompts = self._generation, self._generation.prompts
        generation.model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad("give either prompt or messages", "prompt")
        if body.prompt is not None:
            (ids,) = await unless_disconnected(request, prompts.texts([body.prompt], body.add_special_tokens, "prompt"))
        else:
            check_shape(body.tools or [], Tool, "tools")
            template = self._template(body.chat_template_kwargs, body.tools)
            messages = template_messages(body.messages or [])
            prompts.check(messages, template)
            job = Conversation(messages=messages, template=template, generate=body.add_generation_prompt)
            (ids,) = (await unless_disconnected(request, prompts.conversation(job))).ids
        texts = [self._text.token(id) for id in ids] if body.return_token_strs else None
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
        return {"prompt": self._text.decode(body.tokens, skip_special=False)}


def refuse_unsupported(body: ChatRequest) -> None:
    """Raise HttpError for unsupported fields of a chat."""
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
    """Return the last part of a message: its last text, or its tool calls and the rest of the text before them.

    Args:
        text: new text.
        before: characters that were sent."""
    if "tool_calls" not in message:
        return {"content": text}
    calls = [call | {"index": i} for i, call in enumerate(message["tool_calls"])]
    return {"content": (message["content"] or "")[before:], "tool_calls": calls}
