"""`rollout.exact.attention` under the name that it had first."""

from rollout.exact.attention import trainer_attention, use_exact_attention

__all__ = ["trainer_attention", "use_exact_attention"]
