"""CPU kernels: C attention, products, sampling and decoder layers, one library per instruction set."""
