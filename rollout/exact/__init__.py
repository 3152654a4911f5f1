"""The service's arithmetic for trainers: log-probs that agree in every bit, so that an importance ratio of 1 is 1.

    with RolloutClient(address) as client:
        use_exact(model, client.info.arithmetic)

`use_exact` gives a transformers model our attention and our products, `use_exact_attention` the attention alone: enough where
torch's own products have our bits, which the service's status tells (`torch_bits`).
"""

from rollout.exact.attention import trainer_attention, use_exact_attention
from rollout.exact.module import Exact, sample_logprobs, token_logprobs, use_exact

__all__ = ["Exact", "sample_logprobs", "token_logprobs", "trainer_attention", "use_exact", "use_exact_attention"]
