"""Tessera: LLaMA-family models at long context in JAX; attention reads only the key tiles that matter."""
