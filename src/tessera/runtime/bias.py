"""The bias of the logits: numbers that a request adds to them, and -inf for tokens that may not come next."""

from collections import abc

import numpy as np
from jaxtyping import Float

from tessera.runtime.sequence import Sequence

DEAD_END = "bias, allowed tokens, minimum length and guide leave no token: relax one of them"


def check_bias(sequence: Sequence, vocab_size: int) -> None:
    """Raise ValueError if a new request's `bias` or `allowed` has a wrong token, or if no first token is left."""
    request = sequence.request
    for name in ("bias", "allowed"):
        wrong = [token for token in getattr(request, name) or () if not 0 <= token < vocab_size]
        if wrong:
            raise ValueError(f"{name} has token {wrong[0]}, but token ids are from 0 to {vocab_size - 1}")
    if request.restricted and np.isneginf(own_bias(sequence, vocab_size)).all():
        raise ValueError(DEAD_END)


def bias_of(sequences: abc.Sequence[Sequence | None], shape: tuple[int, int]) -> Float[np.ndarray, "B V"]:
    bias = np.zeros(shape, np.float32)
    for row, sequence in zip(bias, sequences):
        if sequence is None or not sequence.open:
            continue
        if sequence.guided is not None:
            row[:] = sequence.guided
        elif sequence.request.restricted:
            row[:] = own_bias(sequence, len(row))
    return bias


def own_bias(sequence: Sequence, vocab_size: int) -> Float[np.ndarray, "V"]:
    """Return the bias of the next token without the request's guide."""
    request = sequence.request
    bias = np.zeros(vocab_size, np.float32)
    for token, value in request.bias.items():
        bias[token] = value
    if request.allowed is not None:
        kept = bias[request.allowed_ids]
        bias[:] = -np.inf
        bias[request.allowed_ids] = kept
    if sequence.generated < request.min_tokens:  # steps that run ahead of the host have been counted
        bias[_ends(sequence, vocab_size)] = -np.inf
    return bias


def guided_bias(sequence: Sequence) -> Float[np.ndarray, "V"]:
    """Return the bias of the next token by the request and its guide; raise ValueError if no token is left.

    A guide that allows an end-of-sequence token and no other token that the request allows ends the answer.
    """
    allowed = sequence.guide.allowed()
    bias = own_bias(sequence, len(allowed))
    bias[~allowed] = -np.inf
    if np.isneginf(bias).all():
        ends = [token for token in _ends(sequence, len(allowed)) if allowed[token]]
        if not ends:
            raise ValueError(DEAD_END)
        bias[ends] = 0
    return bias


def _ends(sequence: Sequence, vocab_size: int) -> list[int]:
    """Return the tokens that end the answer; a model's files may name some outside its vocabulary."""
    return [token for token in sequence.answer.eos_ids if token < vocab_size]
