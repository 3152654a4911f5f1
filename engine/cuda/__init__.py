"""CUDA: Triton attention and sampling kernels, CUDA graphs, fused and exact layers, memory regions."""
