"""LLaMA-family decoders: config, weights, layers, cache, pages; `files` reads and writes models, `text` tokenises."""
