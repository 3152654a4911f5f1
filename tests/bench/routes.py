"""Routes of experts: what the engine returns, what forwards of a trainer choose, and log-probs in both. Small models with
random weights, one row of `python -m tests.bench experts` for each family:

    max_abs_exact         largest difference between the engine's log-probs and those of a trainer with `use_exact`
    routes_equal          share of positions at which the engine's routes are those that hooks see in that trainer's forward
    routes_equal_plain    the same for transformers' own forward, whose numbers differ in the last bits
    replay_equal          the same for transformers' own forward with `replay`
    bytes_per_token       of routes
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import nn
from transformers import AutoConfig

from rollout.bench.harness import BenchSetup, Row
from rollout.engine.engine import Engine
from rollout.engine.forward.experts import choices_of, experts_in
from rollout.engine.forward.model import Model
from rollout.engine.forward.random_weights import draw
from rollout.engine.values import Group, Sample, Sampling
from rollout.exact import batch_routes, replay, sample_logprobs, use_exact

FAMILIES = ("olmoe", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "glm4_moe", "minimax_m2")
POSITIONS = 10_000
"""of each family, at least; a position has a choice in each layer"""
PROMPT, TOKENS, CHILDREN = 40, 60, 4
"""of a group"""
ROWS = 16
"""sequences of a trainer's batch"""
SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "num_experts": 32, "num_local_experts": 32, "n_routed_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 64,
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "olmoe": {"num_local_experts": 32},
    "gpt_oss": {"head_dim": 32},
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
        "v_head_dim": 24, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
    },
    "glm4_moe": {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1},
}  # fmt: skip
"""fields that only some configurations have; deepseek_v3 has its groups of experts"""


class Forward(NamedTuple):
    """What a trainer's forward made of each sequence."""

    logprobs: list[np.ndarray]
    """[tokens] float32"""
    routes: list[np.ndarray]
    """[positions, layers, chosen]"""


def measure_routes(setup: BenchSetup) -> Iterator[Row]:
    """Yield a row per family. `--scale` multiplies the number of positions."""
    for family in FAMILIES:
        yield measure_family(family, setup, round(POSITIONS * min(1.0, setup.scale)))


def measure_family(family: str, setup: BenchSetup, positions: int) -> Row:
    """Compare the routes and log-probs of a family."""
    dtype = getattr(torch, setup.options.dtype)
    module = draw(AutoConfig.for_model(family, **{**SIZES, **MORE.get(family, {})}), dtype=dtype)
    engine = Engine(
        setup.config(model=family, routed_experts=True, kv_tokens=65_536, block_size=32), Model(copy.deepcopy(module), family)
    )
    assert engine.routing is not None
    groups, samples = sampled(engine, positions)
    exact = copy.deepcopy(module)
    use_exact(exact, engine.arithmetic)
    ours = forward_of(exact, groups, samples)
    plain, replayed = (forward_of(module, groups, samples, replays=each) for each in (False, True))
    return {
        "summary": True, "family": family, "arithmetic": engine.arithmetic, "dtype": setup.options.dtype,
        "positions": sum(len(routes_of(each)) for each in samples),
        "max_abs_exact": largest_gap(ours, samples), "max_abs_plain": largest_gap(plain, samples),
        "max_abs_replay": largest_gap(replayed, samples),
        "routes_equal": equal_share(ours, samples), "routes_equal_plain": equal_share(plain, samples),
        "replay_equal": equal_share(replayed, samples), "bytes_per_token": engine.routing.bytes_per_token,
    }  # fmt: skip


def sampled(engine: Engine, positions: int) -> tuple[list[Group], list[Sample]]:
    """Sample groups of at least so many positions, counting those of a prompt once for each child that trains on them. Returns
    the group of each sample, and the samples, each with the routes of its prompt."""
    count = -(-positions // (CHILDREN * (PROMPT + TOKENS - 1)))
    generator = np.random.default_rng(0)
    sampling = Sampling(n=CHILDREN, max_tokens=TOKENS, ignore_eos=True, routed_experts=True)
    lengths = generator.integers(PROMPT - 20, PROMPT + 21, count)
    prompts = [generator.integers(3, SIZES["vocab_size"], length).astype(np.int32) for length in lengths]
    groups = {str(i): Group(str(i), prompt, sampling) for i, prompt in enumerate(prompts)}
    for group in groups.values():
        engine.submit(group)
    ended = list[Sample]()
    while engine.has_work:
        ended += engine.step()
    routes = {each.group_id: each.prompt_routed_experts for each in ended if each.prompt_routed_experts is not None}
    whole = [with_prompt(each, routes[each.group_id]) for each in ended]
    return [groups[each.group_id] for each in whole], whole


def with_prompt(sample: Sample, routes: np.ndarray) -> Sample:
    """Give a sample the routes of its prompt, which the engine returns once a group."""
    return msgspec.structs.replace(sample, prompt_routed_experts=routes)


def routes_of(sample: Sample) -> np.ndarray:
    """Return the routes of all positions of a sample."""
    assert sample.routes is not None
    return sample.routes


@torch.no_grad()
def forward_of(model: nn.Module, groups: list[Group], samples: list[Sample], replays: bool = False) -> Forward:
    """Run a trainer's forward over all samples, in padded batches. replays: with the engine's routes."""
    made = Forward([], [])
    for first in range(0, len(samples), ROWS):
        some = samples[first : first + ROWS]
        sequences = [(group.prompt, sample.token_ids) for group, sample in zip(groups[first:], some, strict=False)]
        with ExitStack() as stack:
            if replays:
                stack.enter_context(replay(model, batch_routes([routes_of(each) for each in some])))
            seen = watched(model, stack)
            made.logprobs.extend(each.numpy() for each in sample_logprobs(model, sequences))
        chosen = torch.stack([seen[place] for place in range(len(seen))], 1).view(len(some), -1, len(seen), seen[0].shape[1])
        made.routes.extend(row[: len(routes_of(each))].numpy() for row, each in zip(chosen, some, strict=True))
    return made


def watched(model: nn.Module, stack: ExitStack) -> dict[int, torch.Tensor]:
    """Hook the experts of a model. Returns the choices of each in the newest forward, [positions, chosen] by its place."""
    seen: dict[int, torch.Tensor] = {}

    def look(place: int) -> Any:
        return lambda _, args, kwargs: seen.__setitem__(place, choices_of(args, kwargs))

    for place, each in enumerate(experts_in(model)):
        stack.callback(each.module.register_forward_pre_hook(look(place), with_kwargs=True).remove)
    return seen


def largest_gap(forward: Forward, samples: list[Sample]) -> float:
    """Return the largest difference of log-probs."""
    pairs = zip(forward.logprobs, samples, strict=True)
    return max(float(np.abs(ours.astype(np.float64) - sample.logprobs).max()) for ours, sample in pairs)


def equal_share(forward: Forward, samples: list[Sample]) -> float:
    """Return the share of positions with the same experts in every layer, in any order within a layer."""
    equal, total = 0, 0
    for routes, sample in zip(forward.routes, samples, strict=True):
        same = (np.sort(routes, -1) == np.sort(routes_of(sample), -1)).all((1, 2))
        equal, total = equal + int(same.sum()), total + len(same)
    return equal / total
