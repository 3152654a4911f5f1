"""The service's arithmetic for trainers. On the same weights, log-probs are equal to the bit and importance ratios are exactly
1.

    with RolloutClient(address) as client:
        use_exact(model, client.info.arithmetic)

`use_exact` installs the service's attention and products in a transformers model, `use_exact_attention` the attention alone.
That suffices if torch's products have the same bits; `torch_bits` in the service's status says so. `replay` lets a mixture of
experts choose the experts that the service chose, in any arithmetic."""

from rollout.exact.attention import trainer_attention, use_exact_attention
from rollout.exact.module import Exact, sample_logprobs, token_logprobs, use_exact
from rollout.exact.replay import batch_routes, replay

__all__ = [
    "Exact",
    "batch_routes",
    "replay",
    "sample_logprobs",
    "token_logprobs",
    "trainer_attention",
    "use_exact",
    "use_exact_attention",
]
