"""Measure: records, timing, kernels against an oracle, block sizes, and what a plan costs a model."""
