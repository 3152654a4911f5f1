"""Sampling parameters of vLLM and SGLang, converted to `Sampling`.

A field is either part of `Sampling`, or accepted because it changes nothing (`CHANGES_NOTHING`), or unsupported (400, with an
alternative), or unknown (400). Nothing is clamped or dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec

from rollout.engine.values import MAX_PRIORITY, Limits, Sampling
from rollout.http.errors import bad, not_served
from rollout.transport.errors import InvalidRequest

INSTEAD = {
    "best_of": "give n",
    "bad_words": "leave it out",
    "structured_outputs": "ask in the prompt, and check the text",
    "guided_json": "ask in the prompt, and check the text",
    "guided_regex": "ask in the prompt, and check the text",
    "guided_choice": "ask in the prompt, and check the text",
    "response_format": "ask in the prompt, and check the text",
    "truncate_prompt_tokens": "cut the prompt before it is sent",
    "logits_processors": "leave it out",
    "use_beam_search": "give n",
    "vllm_xargs": "leave it out",
    "extra_args": "leave it out",
    "custom_params": "leave it out",
    "regex": "ask in the prompt, and check the text",
    "ebnf": "ask in the prompt, and check the text",
    "length_penalty": "leave it out: it is of beam search",
    "early_stopping": "leave it out: it is of beam search",
    "store": "leave it out: the gateway stores no samples",
    "json_schema": "ask in the prompt, and check the text",
}
"""unsupported fields, and the alternative"""
CHANGES_NOTHING = {
    "spaces_between_special_tokens": "of slow tokenizers; the text of fast ones does not depend on it",
    "detokenize": "the route returns ids only",
    "output_kind": "`stream` decides",
    "user": "a label",
    "metadata": "labels",
    "prompt_cache_key": "a hint; equal prompts share KV without it",
    "safety_identifier": "a label",
    "load_inplace": "loading a name again always replaces its adapter",
    "lora_int_id": "an adapter is found by its name",
    "pinned": "the one adapter is never evicted",
    "reset_external": "KV blocks record their weight version",
    "device": "KV blocks record their weight version",
    "is_async": "old weights serve until the new ones are complete, in any case",
    "torch_empty_cache": "memory of staged weights is freed in any case",
    "keep_pause": "an update never ends a pause",
    "recapture_cuda_graph": "CUDA graphs read the weights in place",
    "token_step": "a label",
    "abort_message": "a label",
}
"""accepted fields that no response can depend on, and why"""
NEUTRAL: tuple[Any, ...] = (None, False, [], {}, "", ())
SALT = re.compile(r"(?:^|\D)(\d{1,18})$")


class CommonSampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters with the same name in vLLM and SGLang, as JSON. null = the default."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[int, float] | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # change only the text
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None


class VllmSampling(CommonSampling, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters of vLLM's routes."""

    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    # unsupported unless neutral
    best_of: int | None = None
    bad_words: list[str] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    logits_processors: list[Any] | None = None
    use_beam_search: bool | None = None
    vllm_xargs: dict[str, Any] | None = None
    extra_args: dict[str, Any] | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    # change only the text
    include_stop_str_in_output: bool | None = None
    routed_experts_prompt_start: int | None = None
    """first position whose routes are returned; verifiers always sends it"""
    return_routed_experts: bool | None = None
    """null: as vLLM, every response has routes if the service keeps them"""


class SGLangSampling(CommonSampling, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters of SGLang."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    sampling_seed: int | None = None
    # unsupported unless neutral
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | None = None
    custom_params: dict[str, Any] | None = None
    # change only the text
    no_stop_trim: bool | None = None


def refuse_unsupported(params: msgspec.Struct) -> None:
    """Raise HttpError for the first unsupported field that is not neutral."""
    for name in unsupported_fields(type(params)):
        value = getattr(params, name)
        if value is None or value in NEUTRAL:
            continue
        if name == "best_of" and value == (getattr(params, "n", None) or 1):
            continue
        if (name, value) in (("response_format", {"type": "text"}), ("length_penalty", 1.0)):
            continue
        raise not_served(f"{name}={value!r}"[:200], INSTEAD[name], name)


@cache
def unsupported_fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(name for name in INSTEAD if name in kind.__struct_fields__)


def given(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not null; `Sampling` validates them."""
    return {name: value for name, value in fields.items() if value is not None}


Special = Callable[[str], int | None]
"""returns the id of the special token with this text, None if there is none"""


def stops(stop: str | list[str] | None, ids: list[int] | None, special: Special) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return stop tokens and stop strings. A string that equals a special token (lm_eval sends the end of sequence) becomes
    that token."""
    texts = (stop,) if isinstance(stop, str) else tuple(stop or ())
    of_texts = {text: special(text) for text in texts}
    found = [id for id in of_texts.values() if id is not None]
    return tuple(dict.fromkeys([*(ids or ()), *found])), tuple(text for text in texts if of_texts[text] is None)


def top_k_of(top_k: int | None) -> int:
    """Return top_k with 0 for off; the APIs use 0, -1 and null."""
    return 0 if top_k is None or top_k == -1 else top_k


def sampling_of(params: VllmSampling, max_tokens: int, special: Special, **more: Any) -> Sampling:
    """Convert vLLM's parameters. more: further fields of `Sampling`. Raises HttpError, InvalidRequest."""
    fields = common_fields(params, special)
    if (params.prompt_logprobs or 0) < 0:
        raise bad(f"prompt_logprobs={params.prompt_logprobs}: must not be negative", "prompt_logprobs")
    allowed = None if params.allowed_token_ids is None else tuple(params.allowed_token_ids)
    more |= given(allowed_token_ids=allowed)
    return checked_sampling(max_tokens=max_tokens, min_tokens=params.min_tokens or 0, seed=params.seed, **fields, **more)


def sglang_sampling_of(params: SGLangSampling, max_tokens: int, special: Special, **more: Any) -> Sampling:
    """Convert SGLang's parameters. more: further fields of `Sampling`. Raises HttpError, InvalidRequest."""
    fields = common_fields(params, special)
    return checked_sampling(
        max_tokens=max_tokens, min_tokens=params.min_new_tokens or 0, seed=params.sampling_seed, **fields, **more
    )


def checked_sampling(**fields: Any) -> Sampling:
    """Return the `Sampling` with these fields. Raises InvalidRequest for a value that it refuses."""
    try:
        return Sampling(**fields)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def common_fields(params: CommonSampling, special: Special) -> dict[str, Any]:
    """Convert the parameters that vLLM and SGLang share. Raises HttpError."""
    refuse_unsupported(params)
    stop_ids, stop = stops(params.stop, params.stop_token_ids, special)
    return {
        "n": 1 if params.n is None else params.n,
        "temperature": 1.0 if params.temperature is None else params.temperature,
        "top_k": top_k_of(params.top_k),
        "top_p": 1.0 if params.top_p is None else params.top_p,
        "min_p": params.min_p or 0.0,
        "stop_token_ids": stop_ids,
        "ignore_eos": bool(params.ignore_eos),
        "stop": stop,
        **given(
            logit_bias=params.logit_bias or None,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
        ),
    }


def top_logprobs_of(wanted: int, field: str) -> dict[str, int]:
    """Return the fields of `Sampling` for the log-probs of the `wanted` most probable tokens. Raises HttpError."""
    if wanted < 0:
        raise bad(f"{field}={wanted}: must not be negative", field)
    return {"top_logprobs": wanted} if wanted else {}


def lag_of(cache_salt: str | None, version: int, limits: Limits) -> int:
    """Return the `max_kv_lag` of a cache_salt, which ends in the oldest weight version whose KV may be used ("7", "ckpt-7").
    version: the live one. Raises HttpError for a salt without a version."""
    if cache_salt is None:
        return 0
    found = SALT.search(cache_salt)
    if found is None:
        raise bad(
            f"cache_salt={cache_salt[:50]!r}: must end in the oldest weight version whose KV may be used, e.g. '7'",
            "cache_salt",
        )
    return min(max(0, version - int(found[1])), limits.max_kv_lag)


def priority_of(priority: int | None) -> int:
    """Convert vLLM's priority, where lower values come first. Raises HttpError."""
    priority = priority or 0
    if abs(priority) > MAX_PRIORITY:
        raise bad(f"priority={priority}: must be between -{MAX_PRIORITY} and {MAX_PRIORITY}", "priority")
    return -priority
