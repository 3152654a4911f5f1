"""The paged KV cache: blocks and their reference counts, the prefix index, the pools on the device and in host memory."""
