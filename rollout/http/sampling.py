"""From the dialects' sampling parameters to `Sampling`, in one place.

A field is one of four kinds: it has a place in `Sampling`; it is neutral and asks for nothing; it asks for what is not served
(501, with what to use instead); or nobody knows it (400). Nothing is clamped or dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from engine.types import MAX_PRIORITY, Limits, Sampling
from rollout.http.errors import bad, not_served

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
    "return_routed_experts": "leave it out",
    "regex": "ask in the prompt, and check the text",
    "ebnf": "ask in the prompt, and check the text",
    "json_schema": "ask in the prompt, and check the text",
}
"""what to do where a field asks for what is not there"""
NEUTRAL: tuple[Any, ...] = (None, False, [], {}, "", ())
SALT = re.compile(r"(?:^|\D)(\d{1,18})$")


class CommonSampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters that vLLM and SGLang call by the same name, as JSON. A null is the default."""

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
    # of the text alone
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None


class VllmSampling(CommonSampling, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters that vLLM's routes have in common."""

    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    # asks for what is not there
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
    # of the text alone
    include_stop_str_in_output: bool | None = None
    detokenize: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    """of beam search, which is not there"""
    output_kind: int | None = None
    """vLLM's word for what a stream holds"""
    routed_experts_prompt_start: int | None = None
    """of an answer's routed experts, which are not there (verifiers sends it in any case)"""


class SGLangSampling(CommonSampling, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters of SGLang."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    sampling_seed: int | None = None
    # asks for what is not there
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | None = None
    custom_params: dict[str, Any] | None = None
    # of the text alone
    no_stop_trim: bool | None = None


def refuse_what_is_not_there(asked: msgspec.Struct) -> None:
    """Raise HttpError 501 for the first field that asks for something, and has no place in `Sampling`."""
    for name, instead in INSTEAD.items():
        value = getattr(asked, name, None)
        if value in NEUTRAL:
            continue
        if name == "best_of" and value == (getattr(asked, "n", None) or 1):
            continue
        raise not_served(f"{name}={value!r}"[:200], instead, name)


def said(**fields: Any) -> dict[str, Any]:
    """Return the fields of `Sampling` that say something: a null is the default, any other value is judged by `Sampling`."""
    return {name: value for name, value in fields.items() if value is not None}


Special = Callable[[str], int | None]
"""the id of the special token that is written so, None if there is none"""


def stops(stop: str | list[str] | None, ids: list[int] | None, special: Special) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return stop tokens and stop strings. A string that is a special token (lm_eval sends the model's end) is that token."""
    texts = (stop,) if isinstance(stop, str) else tuple(stop or ())
    of_texts = {text: special(text) for text in texts}
    found = [id for id in of_texts.values() if id is not None]
    return tuple(dict.fromkeys([*(ids or ()), *found])), tuple(text for text in texts if of_texts[text] is None)


def top_k_of(top_k: int | None) -> int:
    """Return top_k with 0 for off; dialects write 0, -1 or nothing."""
    return 0 if top_k is None or top_k == -1 else top_k


def max_tokens_of(asked: int | None, default: int | None, prompt_tokens: int, context: int, limits: Limits) -> int:
    """Return the most tokens of a completion. Where nothing is asked for: `default`, or with None whatever the context of the
    model leaves. Raises HttpError for a prompt that leaves nothing."""
    if asked is not None:
        return asked
    left = context - prompt_tokens
    if left < 1:
        raise bad(f"prompt of {prompt_tokens} tokens: the context of {context} tokens leaves no room for one", "max_tokens")
    return min(left if default is None else default, left, limits.max_tokens)


def sampling_of(asked: VllmSampling, max_tokens: int, special: Special, **more: Any) -> Sampling:
    """Make the sampling that vLLM's parameters ask for; `more`: further fields. Raises HttpError."""
    fields = common_fields(asked, special)
    if (asked.prompt_logprobs or 0) < 0:
        raise bad(f"prompt_logprobs={asked.prompt_logprobs}: must not be negative", "prompt_logprobs")
    allowed = None if asked.allowed_token_ids is None else tuple(asked.allowed_token_ids)
    more |= said(allowed_token_ids=allowed)
    return Sampling(max_tokens=max_tokens, min_tokens=asked.min_tokens or 0, seed=asked.seed, **fields, **more)


def sglang_sampling_of(params: SGLangSampling, max_tokens: int, special: Special, **more: Any) -> Sampling:
    """Make the sampling that SGLang's parameters ask for; `more`: further fields. Raises HttpError."""
    fields = common_fields(params, special)
    return Sampling(max_tokens=max_tokens, min_tokens=params.min_new_tokens or 0, seed=params.sampling_seed, **fields, **more)


def common_fields(asked: CommonSampling, special: Special) -> dict[str, Any]:
    """Return the fields of `Sampling` that both dialects ask for in the same way. Raises HttpError."""
    refuse_what_is_not_there(asked)
    stop_ids, stop = stops(asked.stop, asked.stop_token_ids, special)
    return {
        "n": 1 if asked.n is None else asked.n,
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "top_k": top_k_of(asked.top_k),
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "min_p": asked.min_p or 0.0,
        "stop_token_ids": stop_ids,
        "ignore_eos": bool(asked.ignore_eos),
        "stop": stop,
        **said(
            logit_bias=asked.logit_bias or None,
            repetition_penalty=asked.repetition_penalty,
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
        ),
    }


def top_logprobs_of(wanted: int, field: str) -> dict[str, int]:
    """Return the fields of `Sampling` for the log-probs of so many likeliest tokens. Raises HttpError."""
    if wanted < 0:
        raise bad(f"{field}={wanted}: must not be negative", field)
    if wanted == 0:
        return {}
    return {"top_logprobs": wanted}


def lag_of(cache_salt: str | None, version: int, limits: Limits) -> int:
    """Return the `max_kv_lag` of a salt: the version of the weights whose KV is still good for this episode, as text that ends
    in its number ("7", "ckpt-7"). `version`: the live one. Raises HttpError for a salt that names none."""
    if cache_salt is None:
        return 0
    found = SALT.search(cache_salt)
    if found is None:
        raise bad(
            f"cache_salt={cache_salt[:50]!r}: must end in the version of the weights whose KV may be used, e.g. '7'",
            "cache_salt",
        )
    return min(max(0, version - int(found[1])), limits.max_kv_lag)


def priority_of(priority: int | None) -> int:
    """Return our priority of vLLM's, where a lower number goes first. Raises HttpError."""
    priority = priority or 0
    if abs(priority) > MAX_PRIORITY:
        raise bad(f"priority={priority}: must be between -{MAX_PRIORITY} and {MAX_PRIORITY}", "priority")
    return -priority
