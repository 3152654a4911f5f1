"""Cuts: the parts of all ranks are the tensor, whichever way a part is read."""

from __future__ import annotations

import random

import pytest
import torch

from rollout.engine.weights.cuts import COLUMNS, ROWS, WHOLE, Cut, NotCut, Part, check_ranks, cuts_of, summed_linears
from tests.support.tiny import tiny


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
        shape = r.choice([(unit * units,), (unit * units, other), (other, unit * units)])
        cut = r.choice([WHOLE, Cut(COLUMNS if shape[0] == other and len(shape) == 2 else ROWS, units)])
        if cut.dim is not None and shape[cut.dim] != unit * units:
            continue
        whole = torch.randn(shape)
        parts = [Part(shape, cut, rank, ranks) for rank in range(ranks)]
        assert torch.equal(joined([whole[part.where()] for part in parts], cut), whole)
        for part in parts:
            assert tuple(whole[part.where()].shape) == part.here
            written, read = torch.zeros(part.here), torch.zeros(shape)
            size = r.randint(1, whole.numel())
            for start in range(0, whole.numel(), size):
                for piece, here in part.overlap(whole.view(-1)[start : start + size], start, written):
                    here.copy_(piece)
                for piece, here in part.overlap(read.view(-1)[start : start + size], start, written):
                    piece.copy_(here)
            assert torch.equal(written, whole[part.where()])
            assert torch.equal(read[part.where()], written) and read.count_nonzero() == written.count_nonzero()


def test_kv_heads_are_replicated_where_there_are_fewer_than_ranks() -> None:
    cut = Cut(ROWS, 2)
    assert [cut.span(2 * 16, rank, 8) for rank in range(8)] == [(0, 16)] * 4 + [(16, 32)] * 4


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
    assert len(summed_linears(module)) == 4


@pytest.mark.parametrize(
    "name, reason",
    [
        ("mixtral", "mixtral has model.layers.0"),
        ("phi3", "phi3 has model.layers.0.self_attn"),
        ("olmo2", r"olmo2 has model.layers.0.self_attn.q_norm.weight"),
        ("gemma3_text", "gemma3_text cannot be divided"),
        ("gpt_oss", "gpt_oss has model.layers.0.self_attn"),
        ("deepseek_v2", "deepseek_v2 has model.layers.0.self_attn"),
    ],
)
def test_other_kinds_are_refused_by_name(name: str, reason: str) -> None:
    with pytest.raises(NotCut, match=rf"{reason}.*serve this one whole \(tp = 1\)"):
        cuts_of(tiny(name))


def test_what_does_not_divide_is_refused() -> None:
    check_ranks(tiny("llama"), 4)
    with pytest.raises(NotCut, match="4 query heads, which 8 ranks cannot share evenly: lower tp"):
        check_ranks(tiny("llama"), 8)
    with pytest.raises(NotCut, match="3 KV heads, of which 2 ranks cannot have equally many"):
        check_ranks(tiny("llama", num_attention_heads=6, num_key_value_heads=3, hidden_size=96), 2)
    with pytest.raises(NotCut, match="100 numbers in its MLP, which are no multiple of 16"):
        check_ranks(tiny("llama", intermediate_size=100), 2)
