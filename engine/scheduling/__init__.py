"""The scheduler: continuous batching, admission, preemption, fairness between clients, speculative decoding."""
