"""Fetching the real model: once, whole or not at all, and a sentence where it cannot be."""


def test_the_real_model_is_fetched(smollm2):
    assert smollm2.stat().st_size == 98362432
