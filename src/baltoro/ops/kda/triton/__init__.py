"""KDA on NVIDIA GPUs in Triton; imported only when `impl="triton"` is asked for."""
