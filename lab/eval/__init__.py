"""Measure what fewer bits cost: in the cache (`cached`) and in the weights of a real model (`weights`)."""
