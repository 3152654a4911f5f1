"""Cuts: the parts of all ranks are the tensor, whichever way a part is read."""

from __future__ import annotations

import random

import pytest
import torch

from rollout.engine.weights.cuts import COLUMNS, ROWS, WHOLE, Cut, NotCut, Part
from rollout.engine.weights.layer_cuts import check_ranks, cuts_of, summed_products
from tests.support.families import build
from tests.support.ranks import tiny_shared
from tests.support.tiny import MODELS, tiny


def joined(parts: list[torch.Tensor], cut: Cut) -> torch.Tensor:
    """Put the parts of all ranks together, each unit once."""
    if cut.dim is None:
        return parts[0]
    apart = max(1, len(parts) // cut.units)  # ranks that have the same unit
    return torch.cat(parts[::apart], cut.dim)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_parts_of_all_ranks_are_the_tensor(ranks: int) -> None:
    r = random.Random(ranks)
    for _ in range(60):
        unit, units, other = r.randint(1, 3), r.choice([1, 2, 4, 8, 16, 19, 24]), r.randint(1, 5)
        cut = Cut(r.choice([ROWS, COLUMNS, 2]), units)
        shape = (*(r.randint(1, 5) for _ in range(cut.dim or 0)), unit * units, *[other] * r.randint(0, 2))
        if r.random() < 0.2:
            cut = WHOLE
        whole = torch.randn(shape)
        parts = [Part(shape, cut, rank, ranks) for rank in range(ranks)]
        assert torch.equal(joined([part.of(whole) for part in parts], cut), whole)
        check_overlap(r, whole, parts)


def check_overlap(r: random.Random, whole: torch.Tensor, parts: list[Part]) -> None:
    """Write parts from pieces of a whole tensor, and pieces from parts."""
    shape = parts[0].shape
    for part in parts:
        assert tuple(part.of(whole).shape) == part.here
        written, read = torch.zeros(part.here), torch.zeros(shape)
        size = r.randint(1, whole.numel())
        for start in range(0, whole.numel(), size):
            for piece, here in part.overlap(whole.view(-1)[start : start + size], start, written):
                here.copy_(piece)
            for piece, here in part.overlap(read.view(-1)[start : start + size], start, written):
                piece.copy_(here)
        assert torch.equal(written, part.of(whole))
        assert torch.equal(part.of(read), written) and read.count_nonzero() == written.count_nonzero()


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dim", [ROWS, COLUMNS])
def test_blocks_that_lie_one_behind_the_other_are_cut_each(ranks: int, dim: int) -> None:
    """Such as gate and up of experts, or q, k and v of a delta net."""
    cut, r = Cut(dim, 4, (8, 8, 24)), random.Random(dim)
    shape = (3,) * dim + (40, 5)
    whole = torch.randn(shape)
    parts = [Part(shape, cut, rank, ranks) for rank in range(ranks)]
    blocks = [part.of(whole).split([block // ranks for block in cut.blocks], dim) for part in parts]
    assert torch.equal(torch.cat([torch.cat(of, dim) for of in zip(*blocks, strict=True)], dim), whole)
    check_overlap(r, whole, parts)


def test_kv_heads_are_replicated_where_there_are_fewer_than_ranks() -> None:
    cut = Cut(ROWS, 2)
    assert [cut.spans(2 * 16, rank, 8) for rank in range(8)] == [[(0, 16)]] * 4 + [[(16, 32)]] * 4


@pytest.mark.parametrize("name", ["llama", "llama-mha", "qwen2", "qwen3", "mistral"])
def test_a_model_of_llama_s_kind_is_cut_by_its_modules(name: str) -> None:
    module = tiny(name)
    cuts = cuts_of(module)
    assert cuts.keys() == {each for each, _ in module.named_parameters(remove_duplicate=False)}
    kv_heads = 4 if name == "llama-mha" else 2
    where = {
        "q_proj.weight": Cut(ROWS, 4),
        "q_proj.bias": Cut(ROWS, 4),
        "k_proj.weight": Cut(ROWS, kv_heads),
        "o_proj.weight": Cut(COLUMNS, 4),
        "down_proj.weight": Cut(COLUMNS, 96),
        "embed_tokens.weight": Cut(ROWS, 199),
        "lm_head.weight": Cut(ROWS, 199),
        "norm.weight": WHOLE,
    }
    for each, cut in cuts.items():
        assert all(cut == want for ending, want in where.items() if each.endswith(ending))
    assert len(summed_products(module)) == 4


QKV = Cut(ROWS, 4, (96, 96, 256))
OF_MIXTURES = {
    "experts.gate_up_proj": Cut(1, 32, (32, 32)),
    "experts.down_proj": Cut(2, 32),
    "mlp.gate.weight": WHOLE,
    "shared_expert_gate.weight": WHOLE,
    "shared_expert.down_proj.weight": Cut(COLUMNS, 48),
}
OF_DELTA_NETS = {
    "in_proj_qkv.weight": QKV,
    "in_proj_qkvz.weight": Cut(ROWS, 4),
    "conv1d.weight": QKV,
    "A_log": Cut(ROWS, 4),
    "dt_bias": Cut(ROWS, 4),
    "linear_attn.norm.weight": WHOLE,
    "linear_attn.out_proj.weight": Cut(COLUMNS, 4),
    "q_proj.weight": Cut(ROWS, 4),
}
OF_CONVOLUTIONS = {
    "conv.in_proj.weight": Cut(ROWS, 128, (128,) * 3),
    "conv.conv.weight": Cut(ROWS, 128),
    "conv.out_proj.weight": Cut(COLUMNS, 128),
    "self_attn.out_proj.weight": Cut(COLUMNS, 4),
    "feed_forward.w1.weight": Cut(ROWS, 96),
    "feed_forward.w2.weight": Cut(COLUMNS, 96),
    "operator_norm.weight": WHOLE,
}


@pytest.mark.parametrize(
    "name, where, summed",
    [
        ("qwen3_moe", OF_MIXTURES, 6),
        ("mixtral", {"experts.gate_up_proj": Cut(1, 96, (96, 96)), "mlp.gate.weight": WHOLE}, 4),
        ("qwen3_5_text", OF_DELTA_NETS, 6),
        ("qwen3_next", OF_MIXTURES | OF_DELTA_NETS, 8),
        ("lfm2", OF_CONVOLUTIONS, 6),
        ("lfm2_moe", {"experts.down_proj": Cut(2, 32), "expert_bias": WHOLE}, 6),
    ],
)
def test_mixtures_and_hybrids_are_cut_by_their_modules(name: str, where: dict[str, Cut], summed: int) -> None:
    module = tiny_shared(name)
    cuts, found = cuts_of(module), set()
    for each, cut in cuts.items():
        for ending, want in where.items():
            if each.endswith(ending):
                assert cut == want, each
                found.add(ending)
    kinds = {
        "qwen3_moe": {"shared_expert_gate.weight", "shared_expert.down_proj.weight"},
        "qwen3_5_text": {"in_proj_qkvz.weight"},
    }
    assert where.keys() - found == kinds.get(name, {"in_proj_qkv.weight"} if name == "qwen3_next" else set())
    assert len(summed_products(module)) == summed
    check_ranks(module, 4)


@pytest.mark.parametrize(
    "name, reason",
    [
        ("phi3", "phi3 has model.layers.0.self_attn"),
        ("olmo2", r"olmo2 has model.layers.0.self_attn.q_norm.weight"),
        ("gemma3_text", "gemma3_text cannot be divided"),
        ("olmoe", r"olmoe has model.layers.0.self_attn.q_norm.weight"),
        ("nemotron_h", "nemotron_h cannot be divided"),
        ("olmo_hybrid", "olmo_hybrid has model.layers.0.linear_attn"),
        ("gpt_oss", "gpt_oss has model.layers.0.self_attn"),
        ("deepseek_v2", "deepseek_v2 has model.layers.0.self_attn"),
    ],
)
def test_other_kinds_are_refused_by_name(name: str, reason: str) -> None:
    with pytest.raises(NotCut, match=rf"{reason}.*serve this one whole \(tp = 1\)"):
        cuts_of(tiny(name) if name in MODELS else build(name))


def test_what_does_not_divide_is_refused() -> None:
    check_ranks(tiny("llama"), 4)
    with pytest.raises(NotCut, match="4 query heads, which 8 ranks cannot share evenly: lower tp"):
        check_ranks(tiny("llama"), 8)
    with pytest.raises(NotCut, match="3 KV heads, of which 2 ranks cannot have equally many"):
        check_ranks(tiny("llama", num_attention_heads=6, num_key_value_heads=3, hidden_size=96), 2)
    with pytest.raises(NotCut, match="100 numbers in its MLP, which are no multiple of 16"):
        check_ranks(tiny("llama", intermediate_size=100), 2)
    with pytest.raises(NotCut, match="layer 0 has 24 numbers in each of its experts, which are no multiple of 16"):
        check_ranks(tiny("qwen3_moe", moe_intermediate_size=24), 2)
    with pytest.raises(NotCut, match="qwen3_5_text: layer 0 has 4 key heads, which 8 ranks cannot share evenly"):
        check_ranks(tiny_shared("qwen3_5_text"), 8)
