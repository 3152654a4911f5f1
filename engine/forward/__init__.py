"""The forward of a step: batch tensors, the transformers model, the attention interface, sampling, the self-check at load."""
