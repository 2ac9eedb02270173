"""The input and output of an engine: requests and events."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from tessera.models.config import ModelConfig
from tessera.models.layers import Params
from tessera.runtime.answers import Generation
from tessera.runtime.limits import RANKS
from tessera.runtime.sampling import Method, Sampling, check_seed


class Guide(Protocol):
    """A restriction of an answer, token by token, such as a grammar.

    Both methods may raise ValueError, which fails the request.
    """

    def allowed(self) -> Bool[np.ndarray, "V"]:
        """Return a mask of the tokens that may come next; at least one must be allowed."""

    def push(self, token: int) -> None:
        """Advance by the answer's next token."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to continue.

    Attributes:
        max_new_tokens: maximum number of tokens to generate; fewer if the model's context ends first.
        stop: texts that end the answer; the answer is cut before the first that appears.
        seed: seed of the random draws, of 64 bits (`sampling.fold_seed`). A draw depends only on the seed, the logits
            and the number of tokens before it.
        bias: token id -> number added to its logit before anything else; -inf forbids the token.
        allowed: ids of the only tokens that the answer may have, end-of-sequence tokens included. None allows all.
        min_tokens: number of tokens before an end-of-sequence token or a stop string may end the answer. A guide whose
            text is complete, so that it allows an end-of-sequence token only, ends the answer all the same.
        top_logprobs: number of best tokens to report per step, at most `limits.RANKS`.
        prompt_logprobs: number of best tokens to report per position of the prompt, at most `limits.RANKS`, together
            with the probability of the prompt's own token; None reports neither. Such a request reuses no cached keys,
            because every row of its prompt must be computed.
        guide: function that makes the Guide of the answer; None restricts nothing. While a request with a guide runs,
            no decode step runs ahead of the host.
        tenant: name of the user or group that the request is charged to. Tenants get equal parts of rows and time, and
            never share keys.
        deadline_s: seconds from the start of the request until its first token is due. None leaves it to the scheduler
            (`Scheduler.due_s`). Ignored by an engine without pages, which prefills in order of arrival.
        ends: ids of further tokens that end the answer, even with `ignore_eos`.
        ignore_eos: whether the answer goes on after an end-of-sequence token, as tools that measure speed want.
        shown: ids of special tokens whose names stay in the answer's text, such as marks of tool calls; the text leaves
            out the names of all others.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    sampling: Sampling = Sampling()
    seed: int = 0
    bias: Mapping[int, float] = MappingProxyType({})
    allowed: Collection[int] | None = None
    min_tokens: int = 0
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    guide: Callable[[], Guide] | None = None
    tenant: str = ""
    deadline_s: float | None = None
    ends: tuple[int, ...] = ()
    ignore_eos: bool = False
    shown: frozenset[int] = frozenset()

    @cached_property
    def method(self) -> Method:
        return self.sampling.method | Method(extra=self.restricted or bool(self.guide or self.top_logprobs))

    @property
    def restricted(self) -> bool:
        """Whether the request has a bias, allowed tokens or a minimum length."""
        return bool(self.bias or self.min_tokens) or self.allowed is not None

    @cached_property
    def allowed_ids(self) -> np.ndarray:
        return np.array(sorted(set(self.allowed)), np.int64)

    def __post_init__(self):
        stop, _ = self.stop, check_seed(self.seed)
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if not 0 <= self.min_tokens <= self.max_new_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} must be from 0 to max_new_tokens={self.max_new_tokens}")
        if self.allowed is not None and not self.allowed:
            raise ValueError("allowed is empty: list at least one token id, or pass None to allow all tokens")
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"{stop=} must hold texts that are not empty")
        if self.ignore_eos and self.guide is not None:
            raise ValueError("ignore_eos=True: a guide ends its answer by an end-of-sequence token; drop either")
        if not 0 <= self.top_logprobs <= RANKS:
            raise ValueError(f"top_logprobs={self.top_logprobs} must be from 0 to {RANKS}")
        if not 0 <= (self.prompt_logprobs or 0) <= RANKS:
            raise ValueError(f"prompt_logprobs={self.prompt_logprobs} must be from 0 to {RANKS}, or None")


class Token(NamedTuple):
    """Event: a request has one more token.

    `logprob` is None only for the first token of a prompt. `text` is the text that this token made final, in whole
    characters. `top` has the request's `top_logprobs` best tokens, best first, each with the ln of its probability.
    """

    id: int
    token: int
    logprob: float | None
    text: str
    top: tuple[tuple[int, float], ...] = ()


class End(NamedTuple):
    """Event: a request is complete; `generation.finish_reason` is "stop" or "length".

    `reused_tokens` counts the prompt's tokens whose keys were still in the cache. If the request has `prompt_logprobs`,
    `prompt` has a Token with log-probabilities, but without text, for each token of the prompt.
    """

    id: int
    generation: Generation
    reused_tokens: int
    prompt: tuple[Token, ...] = ()


class Failure(NamedTuple):
    """Event: a request failed; the other requests continue."""

    id: int
    error: Exception


Event = Token | End | Failure


class PoolState(NamedTuple):
    """How full an engine's pool is: the fractions of pages in use and of pages that are only cached, and how often a
    request had to give up its pages for another one so far.
    """

    usage: float
    cached: float
    preempted: int


def check_tokens(tokens: Sequence[int], config: ModelConfig, name: str) -> None:
    """Raise ValueError if the tokens, called `name`, are none, more than the context, or outside the vocabulary."""
    limit, vocab_size = config.max_positions, config.vocab_size
    if not len(tokens):
        raise ValueError(f"{name} is an empty token list: pass at least one token")
    if len(tokens) > limit:
        raise ValueError(
            f"{name} has {len(tokens)} tokens but the model's context is {limit}: shorten it by "
            f"{len(tokens) - limit} tokens, or use a model with a longer context (max_position_embeddings in "
            f"config.json, context_length in a GGUF file, or YaRN's factor)"
        )
    ids = np.asarray(tokens)
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise ValueError(f"{name} holds token {wrong[0]}, outside the model's vocabulary of {vocab_size} (ids from 0)")


def explain_not_finite(params: Params) -> str:
    """Explain in one sentence why logits are not finite; name weights that are not finite, if there are any."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    broken = [jax.tree_util.keystr(path) for path, leaf in leaves if not bool(jnp.isfinite(leaf).all())]
    if broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        return f"the model's scores are not finite: its weights params{broken[0]}{more} hold NaN or inf; reload them"
    what = "the model's scores are not finite although its weights are"
    if params.embed.dtype == jnp.float32:
        return f"{what}, and float32 is the widest dtype: download the model again"
    return f"{what}: load it with dtype='float32'"
