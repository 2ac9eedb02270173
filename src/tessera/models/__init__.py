"""LLaMA-family decoders: config, weights, cache, tokenizer."""
