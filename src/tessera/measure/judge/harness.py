"""Run a Tessera model under EleutherAI's `lm_eval`; its base package, without torch, is enough.

    import lm_eval, tessera
    from tessera.measure.judge.harness import adapter

    model = tessera.load("path/to/model", attention="kascade")
    lm_eval.simple_evaluate(adapter(model), tasks=["lambada_openai"])

The model answers under its own policy, including the plan's cross-over to dense attention. Prompts longer than the
context lose their beginning, as they do with lm_eval's own models.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tessera.core.shapes import round_up
from tessera.generate import Model
from tessera.runtime.score import predicting, run_whole, score_rows

MAX_NEW_TOKENS = 256
"""Maximum tokens of an answer if the task sets no limit."""

LENGTH_STEP = 256
"""Requests are padded to a multiple of this many tokens, since padding costs less than a compilation per length."""


def log_likelihood(model: Model, tokens: Sequence[int], num_scored: int) -> tuple[float, bool]:
    """Return (sum of ln p of the last `num_scored` tokens, whether every one of them was the top-1 token)."""
    tokens = np.asarray(tokens, np.int32)
    if not 1 <= num_scored < len(tokens):
        raise ValueError(f"{num_scored=} must be at least 1 and less than the number of tokens, {len(tokens)}")
    if len(tokens) > model.config.max_positions:
        raise ValueError(f"{len(tokens)} tokens are more than the context of {model.config.max_positions}")
    num_keys = round_up(len(tokens), LENGTH_STEP)
    hidden, _ = run_whole(model, tokens, model.policy, num_keys=num_keys)
    found = score_rows(model, hidden, tokens, predicting(tokens)[-num_scored:])
    return -float(found.loss.sum(dtype=np.float64)), bool(found.right.all())


def split(model: Model, context: str, continuation: str) -> tuple[list[int], int]:
    """Return the tokens of context + continuation, and how many tokens at their end belong to the continuation.

    Trailing spaces of `context` count as part of the continuation. If there are more tokens than the model takes
    (`max_positions`), the first tokens are dropped.
    """
    moved = len(context) - len(context.rstrip())
    if moved:
        context, continuation = context[:-moved], context[-moved:] + continuation
    whole = model.tokenizer.encode(context + continuation)
    head = model.tokenizer.encode(context) if context else whole[:1]  # without a context, the first token is not scored
    num_scored = max(len(whole) - len(head), 1)
    kept = whole[-model.config.max_positions :]
    return kept, min(num_scored, len(kept) - 1)


def rolling(model: Model, text: str) -> float:
    """Compute ln p of a whole text, except for its first token, in context-sized pieces.

    Pieces overlap by one token, and a piece's first token is not scored, so no token is scored twice.
    """
    ids, size = model.tokenizer.encode(text), model.config.max_positions
    pieces = [ids[i : i + size] for i in range(0, len(ids) - 1, size - 1)]
    return sum(log_likelihood(model, piece, len(piece) - 1)[0] for piece in pieces if len(piece) > 1)


def generate_until(model: Model, context: str, options: dict[str, Any]) -> str:
    """Generate a continuation up to the first stop string, greedily unless the options request sampling."""
    new_tokens = int(options.get("max_gen_toks", options.get("max_new_tokens", MAX_NEW_TOKENS)))
    until = options.get("until", ())
    until = (until,) if isinstance(until, str) else tuple(word for word in until if word)
    draws = options.get("do_sample", False) or options.get("temperature", 0) > 0
    ids = model.tokenizer.encode(context)[-(model.config.max_positions - new_tokens) :]
    [answer] = model.generate(
        [ids],
        max_new_tokens=new_tokens,
        stop=until,
        temperature=float(options.get("temperature", 1.0)) if draws else 0.0,
        top_k=0,  # from here on: override the model's generation_config.json
        top_p=options.get("top_p", 1.0),
        min_p=0.0,
        repetition_penalty=1.0,
    )
    return answer.text


def adapter(model: Model) -> Any:
    """Wrap the model as an `lm_eval.api.model.LM`."""
    from lm_eval.api.model import LM
    from rich.progress import track

    if model.tokenizer is None:
        raise ValueError(f"{model.source} has no tokenizer, but lm_eval's tasks are text: load a model with one")

    class Tessera(LM):
        """Model for lm_eval that answers requests one by one."""

        def loglikelihood(self, requests: Iterable[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            todo = [request.args for request in requests]
            return [
                log_likelihood(model, *split(model, *args)) for args in track(todo, "likelihood", disable=disable_tqdm)
            ]

        def loglikelihood_rolling(self, requests: Iterable[Any], disable_tqdm: bool = False) -> list[float]:
            todo = [request.args for request in requests]
            return [rolling(model, text) for (text,) in track(todo, "likelihood", disable=disable_tqdm)]

        def generate_until(self, requests: Iterable[Any], disable_tqdm: bool = False) -> list[str]:
            todo = [request.args for request in requests]
            return [generate_until(model, *args) for args in track(todo, "answers", disable=disable_tqdm)]

    return Tessera()
