"""Replay of routes in a trainer: recorded experts, live weights, and a gradient for the router."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rollout.engine.cpu import isa
from rollout.engine.forward.experts import NoRoutes, experts_in
from rollout.exact import batch_routes, replay, use_exact
from rollout.exact.replay import LIVE, Replayed, router_of
from tests.support.families import build
from tests.support.routes import hooked
from tests.support.samebits import engine_of, prompt
from tests.support.toy import group, run

SUPPORTED = ("olmoe", "qwen3_moe", "qwen3_5_moe_text", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss", "minimax_m2")
ROWS, LENGTH = 2, 11


def inputs() -> torch.Tensor:
    return torch.as_tensor(np.stack([prompt(LENGTH, row) for row in range(ROWS)])).long()


def random_routes(made: Any, seed: int = 0) -> torch.Tensor:
    """Return [ROWS, LENGTH, layers, chosen] distinct experts, in a random order."""
    layers = experts_in(made)
    generator, chosen = torch.Generator().manual_seed(seed), made.config.num_experts_per_tok
    experts = int(layers[0].module.num_experts)  # type: ignore[call-overload]
    return torch.rand(ROWS, LENGTH, len(layers), experts, generator=generator).topk(chosen).indices


def seen_in(made: Any, ids: torch.Tensor, routes: Any = None) -> torch.Tensor:
    """Return the choices of a forward, [rows, length, layers, chosen]."""
    with hooked(made) as seen, torch.no_grad():
        if routes is None:
            made(input_ids=ids, use_cache=False)
        else:
            with replay(made, routes):
                made(input_ids=ids, use_cache=False)
    return torch.stack([seen[place].view(*ids.shape, -1) for place in range(len(seen))], 2)


@pytest.mark.parametrize("name", SUPPORTED)
def test_the_choices_are_the_recorded_ones(name: str) -> None:
    """Those below 0 are the model's own, which the layers before may have changed; afterwards all are."""
    made = build(name)
    ids, routes = inputs(), random_routes(made)
    live = seen_in(made, ids)
    routes[1, 4:, 0] = LIVE
    got = seen_in(made, ids, routes)
    kept = routes[..., 0] >= 0
    assert torch.equal(got[kept], routes[kept])
    assert torch.equal(got[1, 4:, 0], live[1, 4:, 0])  # the first layer sees what it saw without replay
    assert not torch.equal(live[kept], routes[kept])
    assert torch.equal(seen_in(made, ids), live) and torch.equal(seen_in(made, ids, live), live)
    assert not any("forward" in vars(each) for each in made.modules())


@pytest.mark.parametrize("name", SUPPORTED)
def test_live_routes_change_no_bit(name: str) -> None:
    made = build(name)
    ids = inputs()
    with torch.no_grad():
        plain = made(input_ids=ids, use_cache=False).logits
        with replay(made, seen_in(made, ids)):
            assert torch.equal(made(input_ids=ids, use_cache=False).logits, plain)
        with replay(made, torch.full((ROWS, LENGTH, len(experts_in(made)), made.config.num_experts_per_tok), LIVE)):
            assert torch.equal(made(input_ids=ids, use_cache=False).logits, plain)
        with replay(made, random_routes(made)):
            assert not torch.equal(made(input_ids=ids, use_cache=False).logits, plain)


@pytest.mark.some(8)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", SUPPORTED)
def test_the_router_has_the_gradient_of_its_weights(name: str, exact: bool) -> None:
    """Against finite differences of the loss. Without our kernels in double precision, as far as the router itself is."""
    if exact and isa.lacking("avx2"):
        pytest.skip("no kernels for this CPU")
    made = build(name, torch.float32 if exact else torch.float64)
    routes, ids = random_routes(made), inputs()
    if exact:
        use_exact(made, block_size=8)
    else:
        made.set_experts_implementation("eager")
    weight = dict(router_of(made, experts_in(made)[1])[1].named_parameters())["weight"]

    def loss() -> torch.Tensor:
        with replay(made, routes):
            logits = made(input_ids=ids, use_cache=False).logits
        return logits.double().log_softmax(-1)[..., 7].mean()  # type: ignore[no-any-return]

    loss().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    gradient, step = weight.grad.double(), 1e-2
    assert torch.isfinite(gradient).all() and gradient.abs().max() > 0
    direction = gradient / gradient.norm()
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            weight.add_(sign * step * direction.to(weight.dtype))
            values.append(float(loss()))
            weight.sub_(sign * step * direction.to(weight.dtype))
    slope = (values[0] - values[1]) / (2 * step)
    assert slope == pytest.approx(float(gradient.norm()), rel=2e-3)


def test_a_gradient_that_does_not_reach_the_router_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    answer = Replayed.__torch_function__

    def detached(self: Replayed, func: Any, *rest: Any) -> Any:
        found = answer(self, func, *rest)
        return torch.return_types.topk((found[0].detach(), found[1])) if func is torch.topk else found

    monkeypatch.setattr(Replayed, "__torch_function__", detached)
    with pytest.raises(AssertionError):
        test_the_router_has_the_gradient_of_its_weights("qwen3_moe", False)


@pytest.mark.skipif(bool(isa.lacking("avx2")), reason="no kernels for this CPU")
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_trainer_of_other_numbers_has_the_routes_of_the_service(name: str) -> None:
    """In bf16 transformers' own forward routes some tokens elsewhere; with replay none, in a padded batch and in a packed
    one."""
    made = build(name, torch.bfloat16)
    engine = engine_of(made, routed_experts=True)
    groups = [
        group(f"g{i}", prompt(length, i), n=1, max_tokens=30, seed=i, ignore_eos=True, routed_experts=True)
        for i, length in enumerate((61, 40, 9))
    ]
    samples = run(engine, groups)
    mine = [samples[each.id, 0] for each in groups]
    whole = [torch.as_tensor(np.concatenate([each.prompt, samples[each.id, 0].token_ids])[:-1]).long() for each in groups]
    routes = [sample.routes for sample in mine]
    assert all(each is not None and len(each) == len(tokens) for each, tokens in zip(routes, whole, strict=True))
    ids = torch.nn.utils.rnn.pad_sequence(whole, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in whole], batch_first=True)
    given = batch_routes([each for each in routes if each is not None])
    assert given.shape[:2] == ids.shape
    elsewhere = seen_in(made, ids)[mask > 0] != given[mask > 0]
    assert elsewhere.any(), "plain numbers route alike: nothing is shown"
    assert torch.equal(seen_in(made, ids, given)[mask > 0], given[mask > 0].long())
    packed = torch.cat(whole)[None]
    flat = np.concatenate([each for each in routes if each is not None])
    assert np.array_equal(seen_in(made, packed, flat)[0].numpy(), flat)


def test_padding_is_routed_live() -> None:
    one, other = np.zeros((3, 2, 4), np.uint8), np.ones((5, 2, 4), np.uint16)
    made = batch_routes([one, other], length=6)
    assert made.shape == (2, 6, 2, 4) and made.dtype == torch.int16
    assert (made[0, 3:] == LIVE).all() and (made[1, 5:] == LIVE).all() and (made[0, :3] == 0).all() and (made[1, :5] == 1).all()
    with pytest.raises(ValueError, match="routes of 5 positions for a batch of 4"):
        batch_routes([one, other], length=4)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda routes: routes.float(), r"routes are float32 \[2, 11, 4, 2\]: must be integers"),
        (lambda routes: routes[:, :, :3], r"routes are int64 \[2, 11, 3, 2\].*the model has 4 layers with experts"),
        (lambda routes: routes[0, 0], "must be integers"),
        (lambda routes: routes + 3, r"routes hold expert \d: must be 0 to 3, or -1"),
        (lambda routes: routes[:, :5], r"chooses \[22, 2\], the routes are \[10, 2\]: give them for each position"),
        (lambda routes: routes[..., :1], r"chooses \[22, 2\], the routes are \[22, 1\]"),
    ],
)
def test_routes_that_do_not_fit_are_refused(change: Callable[[torch.Tensor], torch.Tensor], why: str) -> None:
    made = build("qwen3_moe")
    with pytest.raises(ValueError, match=why), replay(made, change(random_routes(made))):
        made(input_ids=inputs(), use_cache=False)
    assert not any("forward" in vars(each) for each in made.modules()), "the model is restored"


def test_routers_that_are_not_supported_are_refused_by_name() -> None:
    with pytest.raises(
        NoRoutes, match=r"PhimoeForCausalLM: the router of model.layers.0.mlp.experts is not a module next to it"
    ):
        with replay(build("phimoe"), np.zeros((1, 1, 4, 2), np.uint8)):
            pass
    with pytest.raises(NoRoutes, match="Qwen3ForCausalLM is no mixture"), replay(build("qwen3"), np.zeros((1, 1, 4, 2))):
        pass


def test_a_router_that_chooses_twice_is_refused() -> None:
    made: Any = build("qwen3_moe")
    router = made.model.layers[0].mlp.gate
    plain = type(router).forward

    class Twice(type(router)):  # type: ignore[misc]
        def forward(self, hidden: torch.Tensor) -> Any:
            torch.ones(3).topk(1)
            plain(self, hidden)
            return plain(self, hidden)

    router.__class__ = Twice
    with pytest.raises(NoRoutes, match=r"model.layers.0.mlp.gate \(Twice\) chose experts by 2 calls of topk, not by one"):
        with replay(made, random_routes(made)):
            made(input_ids=inputs(), use_cache=False)
