"""Element-wise functions: a number's bits do not depend on where it stands in a tensor, nor on how many threads there are."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function_unary

from rollout.engine.cpu import functions, select_path
from rollout.engine.cpu.functions import (
    FUNCTIONS,
    GRAIN,
    VECTOR,
    WholeVectors,
    callers,
    plain_calls,
    plain_functions,
    use_whole_vectors,
    whole,
)
from rollout.engine.cpu.kernels import choose
from rollout.engine.forward.model import Model
from rollout.exact import sample_logprobs, use_exact
from tests.support.equipped import equip
from tests.support.equivalence import assert_same
from tests.support.families import build
from tests.support.tiny import tiny, tiny_engine
from tests.support.toy import group, run

Function = Callable[[torch.Tensor], torch.Tensor]
SMOOTH: dict[str, Function] = {
    **{name: getattr(torch, name) for name in ("sigmoid", "tanh", "exp", "exp2", "erf", "sin", "cos", "sinh", "cosh", "expm1")},
    **{name: getattr(functional, name) for name in ("silu", "gelu", "softplus", "mish", "elu", "selu", "logsigmoid")},
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu squared": lambda x: functional.relu(x).square(),
    "a power": lambda x: x.abs() ** 1.5,
    "an inverse root": lambda x: (x.abs() + 0.1).rsqrt(),
    "log": lambda x: (x.abs() + 0.1).log(),
    "soft cap": lambda x: torch.tanh(x / 3) * 3,
    "gate": lambda x: x * torch.sigmoid(1.702 * x),
    "half of a row": lambda x: functional.silu(torch.cat([x, x], -1).chunk(2, -1)[0]),
    "heads first": lambda x: functional.gelu(x.t()).t(),
    "two tensors": lambda x: torch.logaddexp(x, x[:, :1]),
    "rotated": lambda x: torch.view_as_real(torch.complex(x.float(), x.float()) * torch.complex(x.float(), 1 - x.float())),
    "softmax": lambda x: x.softmax(-1),
    "layer norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "rms norm": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
}  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SMOOTH)
def test_a_row_is_the_same_among_others(name: str, dtype: torch.dtype) -> None:
    function, x = SMOOTH[name], (torch.randn(33, 70, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    for width in range(1, 71):
        rows = x[:, :width].contiguous()
        with WholeVectors():
            crowd = function(rows)
            for few in (1, 2, 3, 17):
                assert torch.equal(function(rows[-few:]), crowd[-few:]), (width, few)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SMOOTH)
def test_a_thread_s_share_ends_nowhere(name: str, dtype: torch.dtype) -> None:
    """So many numbers that torch hands them to several threads."""
    function, before = SMOOTH[name], torch.get_num_threads()
    x = (torch.randn(67, 1003, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    made = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        with WholeVectors():
            made.append(function(x))
    torch.set_num_threads(before)
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])


def shares(size: int, threads: int, grain: int) -> list[int]:
    """Numbers of each thread, as at::parallel_for has it."""
    tasks = min(threads, -(-size // grain))
    share = -(-size // tasks)
    return [min(share, size - begin) for begin in range(0, size, share)]


def test_every_share_is_whole_vectors() -> None:
    for threads in (1, 2, 3, 4, 7, 12, 48, 64):
        for size in (1, 63, 64, 65, 1000, 16_384, 16_385, 32_769, 50_001, 98_305, 1_000_003, 7_654_321):
            padded = whole(size, threads)
            assert size <= padded <= size * 1.3 + VECTOR * threads
            for grain in (GRAIN, max(1, padded // threads) if padded > functions.SERIAL else GRAIN):
                assert all(share % VECTOR == 0 for share in shares(padded, threads, grain)), (threads, size)


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "function": torch.sigmoid, "method": lambda x: x.sigmoid(), "functional": functional.silu, "special": torch.special.expit,
    "in place": lambda x: x.clone().sigmoid_(), "asked to be": lambda x: functional.silu(x.clone(), inplace=True),
    "operator": lambda x: x**1.5, "reflected": lambda x: 1.7**x, "named": lambda x: torch.pow(x, exponent=-0.5),
    "module": nn.GELU(approximate="tanh"), "root": lambda x: x.bfloat16().rsqrt(), "scaled": lambda x: x.add(x, alpha=0.3),
    "complex": lambda x: torch.complex(x, x) * torch.complex(x, x),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_every_way_to_call_is_seen(name: str) -> None:
    class Calls(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return CALLS[name](x)

    module, x = nn.Sequential(nn.Identity(), Calls()), torch.rand(5, 7) + 0.5
    with callers(module) as called:
        module(x)
    assert list(called.found.values()) == [module[1]]
    want = module(x)
    use_whole_vectors(called.found.values())
    got = module(x)
    assert got.shape == want.shape and got.dtype == want.dtype
    torch.testing.assert_close(got, want)


def test_a_forward_of_the_instance_is_seen() -> None:
    """Hooks of accelerate, and recurrent mixers, give an instance a forward of its own."""
    depth: list[int] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        depth.append(torch._C._len_torch_function_stack())
        return torch.sigmoid(x)

    module, x = nn.Sequential(nn.Identity()), torch.randn(133, 6, generator=torch.Generator().manual_seed(0))
    module[0].forward = forward
    with callers(module) as called:
        module(x)
    assert list(called.found.values()) == [module[0]]
    use_whole_vectors(called.found.values())
    assert torch.equal(torch.cat([module(row) for row in x.split(1)]), module(x)) and set(depth[1:]) == {1}
    plain_functions(module)
    module(x)
    assert depth[-1] == 0


def test_one_mode_at_a_time() -> None:
    """A module within another one, and after it."""
    depth: list[int] = []

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module | None = None) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            depth.append(torch._C._len_torch_function_stack())
            return torch.sigmoid(x) if self.inner is None else self.inner(x)

    module = Outer(Outer())
    use_whole_vectors(module.modules())
    module(torch.rand(3)), module.inner(torch.rand(3))  # type: ignore[misc]
    assert depth == [1, 1, 1] and not torch._C._len_torch_function_stack()


def test_wrappers_of_kernels_are_no_calls() -> None:
    """What they look up at tensors is none of the mode's business, unless they raise in the middle of it."""

    @plain_calls
    def wrapper(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            raise ValueError("one")
        return torch.sigmoid(x)

    x = torch.randn(13)
    seen: list[Any] = []

    class Counts(WholeVectors):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    with Counts():
        assert torch.equal(wrapper(x), wrapper(x))
        with pytest.raises(ValueError, match="one"):
            wrapper(x[:1])
        seen.clear()
        wrapper(x)
        assert not seen
        torch.sigmoid(x)
        assert seen == [torch.sigmoid]


def test_what_is_rounded_alike_everywhere_is_left_alone() -> None:
    class Norm(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) + x**3 - x.sqrt() / 3

    norm = Norm()
    with callers(norm) as called:
        norm(torch.rand(3, 5))
    assert not called.found


def test_in_place_is_in_place_and_the_gradient_is_torch_s() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    for function in (lambda x: functional.gelu(x, approximate="tanh"), lambda x: torch.sigmoid_(x * 1)):
        (want,) = torch.autograd.grad(function(x).square().sum(), x)
        with WholeVectors():
            (got,) = torch.autograd.grad(function(x).square().sum(), x)
        torch.testing.assert_close(got, want)
    y = torch.randn(3, 5)
    want = y.sigmoid()
    with WholeVectors():
        assert y.sigmoid_() is y
    torch.testing.assert_close(y, want)


def test_a_module_can_be_copied_pickled_and_put_back() -> None:
    act = nn.Sequential(nn.GELU(approximate="tanh"), nn.Linear(3, 3))
    use_whole_vectors([act[0]])
    for other in (copy.deepcopy(act), pickle.loads(pickle.dumps(act))):
        assert type(other[0]) is type(act[0]) is not nn.GELU and isinstance(other[0], nn.GELU)
        assert other[0].approximate == "tanh" and other(torch.ones(2, 3)).shape == (2, 3)
    use_whole_vectors([act[0]])
    plain_functions(act)
    assert type(act[0]) is nn.GELU


def scalar_end(x: torch.Tensor) -> torch.Tensor:
    """A function as torch has them, whatever the CPU: what is left over after the last vector has other bits."""
    if has_torch_function_unary(x):
        return handle_torch_function(scalar_end, (x,), x)
    out = functional.relu(x).contiguous()
    end = out.view(-1)[out.numel() // VECTOR * VECTOR :]
    end.copy_(torch.nextafter(end, torch.full_like(end, torch.inf)))
    return out


class Ends(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scalar_end(x)


def of_ends(width: int = 100) -> Model:
    module = tiny("llama", intermediate_size=width)
    for layer in module.model.layers:
        layer.mlp.act_fn = Ends()
    return Model(module, "ends")


@pytest.mark.parametrize("isa", ["auto", "torch"])
def test_a_function_that_depends_on_the_batch_is_named(isa: str, caplog: pytest.LogCaptureFixture) -> None:
    computes = equip(of_ends(), isa)
    assert computes.batch_invariant is False and computes.arithmetic.endswith("/batch")
    assert "other bits than with" in computes.why and "samples depend on the batch" in caplog.text
    with pytest.raises(ValueError, match="whose numbers depend on the batch"):
        use_exact(tiny("llama"), computes.arithmetic)


@pytest.mark.parametrize("isa", ["auto", "torch"])
def test_it_is_not_in_whole_vectors(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FUNCTIONS, scalar_end, lambda args, kwargs: True)
    computes = equip(of_ends(), isa)
    assert computes.batch_invariant and "/batch" not in computes.arithmetic
    monkeypatch.setattr(select_path, "use_whole_vectors", lambda modules: None)
    assert equip(of_ends(), isa).batch_invariant is False
    assert equip(of_ends(128), isa).batch_invariant, "rows of whole vectors need no help"


def test_experts_have_whole_vectors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their products are ours, and their activation has the bits of torch's vector code."""
    model = Model(tiny("mixtral", torch.bfloat16, hidden_act="gelu"), "mixtral")
    computes = equip(model)
    assert "/batch" not in computes.arithmetic and computes.batch_invariant
    experts = model.module.model.layers[0].mlp.experts
    assert "plain_class" in vars(type(experts.act_fn))


ODD = {"intermediate_size": 100, "vocab_size": 197}
S, F = "sliding_attention", "full_attention"
NARROWER = {"hidden_size": 72, "head_dim": 18}
GEMMA4 = {"hidden_size_per_layer_input": 8, "num_hidden_layers": 2, "layer_types": [S, F], "sliding_window": 16,
          "num_kv_shared_layers": 0}  # fmt: skip
FAMILIES: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {**ODD, "hidden_act": "gelu_pytorch_tanh"}, "auto"), ("llama", {**ODD, **NARROWER}, "auto"),
    ("gemma3_text", ODD, "auto"), ("gemma4_text", {**ODD, **GEMMA4}, "auto"), ("starcoder2", ODD, "auto"), ("phi", ODD, "auto"),
    ("olmo2", {**ODD, "intermediate_size": 44}, "auto"), ("gpt_bigcode", {"n_inner": 100}, "auto"), ("apertus", ODD, "auto"),
    ("gemma3_text", ODD, "torch"), ("llama", {**ODD, **NARROWER}, "torch"),
]  # fmt: skip


@pytest.mark.some(3)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family[0]}-{family[1].get('hidden_act', '')}-{family[2]}")
def test_samples_of_odd_widths_are_the_same_alone(family: tuple[str, dict[str, Any], str]) -> None:
    name, sizes, isa = family
    module = build(name, **sizes)
    few = [group(str(i), range(20, 25 + 16 * i), n=2, max_tokens=8, seed=i, ignore_eos=True) for i in range(3)]
    crowd, one = (
        tiny_engine(model=copy.deepcopy(module), isa=isa, threads=1, **more)
        for more in ({}, {"max_num_seqs": 1, "max_batch_tokens": 17, "prefix_cache": False})
    )
    samples = run(crowd, few)
    assert crowd.status()["batch_invariant"] and "/batch" not in crowd.arithmetic
    assert_same(samples, run(one, few))


@pytest.mark.parametrize("name", ["gemma3_text", "starcoder2", "llama"])
def test_a_trainer_has_the_bits_of_odd_widths(name: str) -> None:
    """Each sequence alone, and all in one padded batch; afterwards the module is what it was. Where torch has no vectors its
    log_softmax has bits of its own (`torch_logprobs`), whatever the logits."""
    module = build(name, **{**ODD, "hidden_act": "gelu_pytorch_tanh"})
    kinds = [type(each) for each in module.modules()]
    engine = tiny_engine(model=copy.deepcopy(module), threads=1)
    few = [group(str(i), range(20, 25 + 13 * i), n=2, max_tokens=9, seed=i, ignore_eos=True) for i in range(3)]
    samples = run(engine, few)
    pairs = [(each.prompt, samples[each.id, index].token_ids) for each in few for index in range(2)]
    exact = use_exact(module, engine.arithmetic, block_size=8)
    with torch.no_grad():
        together = sample_logprobs(module, pairs)
        alone = [sample_logprobs(module, [pair])[0] for pair in pairs]
    assert all(torch.equal(mine, own) for mine, own in zip(together, alone, strict=True))
    if (kernels := choose().kernels) is None or kernels.torch_logprobs:
        of_service = [samples[each.id, index].logprobs for each in few for index in range(2)]
        assert all(torch.equal(mine, torch.from_numpy(theirs)) for mine, theirs in zip(together, of_service, strict=True))
    exact.remove()
    assert [type(each) for each in module.modules()] == kinds
