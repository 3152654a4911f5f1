"""Several ranks run one replica (docs/decisions/tensor-parallel.md)."""
