"""Weights: in-place refresh as a transaction, LoRA merge, weight offload, sleep."""
