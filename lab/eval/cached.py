"""Measure what an int8 cache costs: closeness to the float cache on text, and answers to questions.

    python -m lab eval --suite cache                    the shipped model and its plan
    python -m lab eval --suite cache --model smollm2    a real model and its plan

Every contender is compared with dense attention on a float cache. The control rounds each key and value to 15 levels (4
bits) where the int8 cache has 255, also with one scale per position and head. If the control does not come out worse,
the texts and questions are too coarse to judge a cache.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax import Array

from lab.eval import mean_interval, tasks
from lab.eval.fidelity import fidelity
from tessera.core import hardware
from tessera.generate import Model
from tessera.measure import evidence
from tessera.measure.evidence import How, Record, What
from tessera.measure.judge import probes, texts
from tessera.measure.judge.answers import run_trials
from tessera.measure.judge.contenders import plan_policy
from tessera.runtime.sampling import GREEDY
from tessera.runtime.score import run_whole
from tessera.sparse.baselines import Dense
from tessera.sparse.plan import Plan

LEVELS = 7
"""Largest magnitude of a 4-bit number."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Amount of work: text windows and documents of `length` tokens each."""

    length: int = 2048
    windows: int
    documents: int


SHIPPED, REAL = Sizes(windows=4, documents=8), Sizes(windows=2, documents=3)
"""Sizes for the shipped model and for other models. REAL's documents hold several facts each, so fewer suffice."""


@dataclass(frozen=True, kw_only=True)
class Coarse(Dense):
    """Dense attention on keys and values rounded to 4 bits, one scale per position and KV head."""

    @property
    def name(self) -> str:
        return "dense, 4 bits"

    def attend(self, layer, q, kv, spec, positions, state):
        return super().attend(layer, q, kv._replace(k=coarse(kv.k), v=coarse(kv.v)), spec, positions, state)


def coarse(x: Array) -> Array:
    """Round x to 15 levels: multiples of max |x| / 7, with the maximum over the last axis."""
    step = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / LEVELS
    return jnp.where(step > 0, jnp.round(x / jnp.where(step > 0, step, 1)) * step, x).astype(x.dtype)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A model under one policy and cache, and the names of the policy and the cache in its records' titles."""

    name: str
    attention: str
    cache: str
    model: Model

    @property
    def title(self) -> str:
        return f"{self.attention}, {self.cache} cache"


def contenders(model: Model, plan: Plan | None) -> Iterator[Contender]:
    """Yield dense on a float (the reference), an int8 and a 4-bit cache, then the plan on a float and an int8 cache."""
    dtype = str(model.params.embed.dtype)
    dense = replace(model, policy=Dense(), kv_dtype=None)
    yield Contender(name="dense", attention="dense", cache=dtype, model=dense)
    yield Contender(name="dense int8", attention="dense", cache="int8", model=replace(dense, kv_dtype="int8"))
    yield Contender(name="control", attention="dense", cache="4 bits", model=replace(dense, policy=Coarse()))
    if plan is not None:
        sparse = replace(dense, policy=plan_policy(model, plan))
        yield Contender(name="plan", attention="the plan", cache=dtype, model=sparse)
        yield Contender(name="plan int8", attention="the plan", cache="int8", model=replace(sparse, kv_dtype="int8"))


def run(
    model: Model,
    plan: Plan | None,
    *,
    label: str,
    shipped: bool,
    text: str | None = None,
    out: Path | None = None,
    command: str = "python -m lab eval --suite cache",
    sizes: Sizes | None = None,
) -> int:
    """Measure every contender on text and on questions; append and print a record per measurement.

    Args:
        model: the model; needs a tokenizer and a context of at least `sizes.length` tokens.
        plan: the caches are measured under dense attention and under this plan, without its cross-over; if None, only
            under dense attention.
        label: the model's name in the records.
        shipped: whether the model is the shipped one, which answers only the questions that it was trained on.
        text: text for windows and filler; the "reference" domain of `texts` if None.
        out: file of records; evidence/eval-<device>.jsonl if None.
        sizes: amount of work; SHIPPED or REAL if None.

    Raises:
        ValueError: the model has no tokenizer, or its context is too short.
    """
    if sizes is None:
        sizes = SHIPPED if shipped else REAL
    if model.tokenizer is None:
        raise ValueError(f"{model.source} has no tokenizer, but the questions are text: pass a model with a tokenizer")
    if model.config.max_positions < sizes.length:
        context = model.config.max_positions
        raise ValueError(f"the model's context of {context} tokens is too short: {sizes.length} are needed")
    out = Path("evidence") / f"eval-{hardware.device_slug()}.jsonl" if out is None else Path(out)
    body = texts.reference() if text is None else text
    ids = np.asarray(model.tokenizer.encode(body[: 40 * sizes.windows * sizes.length]), np.int32)
    windows = texts.windows_of(ids, sizes.windows, sizes.length)
    asked = shipped_questions(body, sizes) if shipped else real_questions(model, body, sizes)
    reference = None
    for contender in contenders(model, plan):
        if reference is None:
            reference = [run_whole(contender.model, window, Dense())[0] for window in windows]
            found = []
        else:
            found = [on_text(contender, windows, reference, label, command)]
        for record in [*found, on_questions(contender, asked, label, command)]:
            evidence.append(out, record)
            print(f"{record.what.workload}: {record.facts['mean']:.3g} {record.unit}", flush=True)
    return 0


def on_text(
    contender: Contender, windows: Sequence[np.ndarray], reference: Sequence[np.ndarray], label: str, command: str
) -> Record:
    """Record the KL divergence from dense attention on a float cache: one mean over tokens per window."""
    found = fidelity(contender.model, contender.model.policy, windows, reference)
    how = How(iterations=len(found.kl), check="KL(dense on a float cache || this), mean over the tokens of each window")
    facts = {"agreement": found.agreement, "tokens": found.num_tokens}
    return _record(contender, "text", found.kl, "nats", how, facts, label, command)


def on_questions(contender: Contender, asked: Callable[[Model], list[float]], label: str, command: str) -> Record:
    """Record the share of questions answered right; the facts hold each question's score."""
    scores = asked(contender.model)
    how = How(iterations=len(scores), check="answers to questions about a fact hidden in a document")
    return _record(contender, "questions", scores, "fraction", how, {"scores": scores}, label, command)


def _record(contender, question, samples, unit, how, facts, label, command) -> Record:
    low, high = mean_interval(samples)
    what = What(
        op="eval cache",
        kernel=contender.name,
        workload=f"{label}, {question}: {contender.title}",
        dtype=str(contender.model.params.embed.dtype),
        title=f"{label}, {contender.title}",
    )
    facts = facts | {"mean": float(np.mean(samples)), "low": low, "high": high, "model": label, "question": question}
    facts |= {"attention": contender.attention, "cache": contender.cache}
    return evidence.make(what, list(samples), command=command, unit=unit, how=how, facts=facts)


def shipped_questions(text: str, sizes: Sizes) -> Callable[[Model], list[float]]:
    """Return a function that asks a model the shipped model's questions and returns a score from 0 to 1 for each.

    Each question is about one fact. The facts are hidden at evenly spaced depths, and answers are decoded greedily.
    """
    [kind, *_] = tasks.KINDS

    def ask(model: Model) -> list[float]:
        hay = tasks.Hay(text=text, count=lambda piece: len(model.tokenizer.encode(piece)))
        scores = []
        for index in range(sizes.documents):
            depth = (index + 0.5) / sizes.documents
            sample = tasks.make(kind, hay, sizes.length, seed=(sizes.length, index), depth=depth)
            [answer] = model.generate([sample.prompt], max_new_tokens=sample.answer_tokens, **GREEDY)
            scores.append(float(sample.score(answer.text)))
        return scores

    return ask


def real_questions(model: Model, text: str, sizes: Sizes) -> Callable[[Model], list[float]]:
    """Return a function that asks a model several questions per document (see `probes`) and returns 0 or 1 for each."""
    filler = probes.Filler.of(model.tokenizer, text)
    documents = [
        probes.make_document("single", filler, sizes.length, (sizes.length, i)) for i in range(sizes.documents)
    ]

    def ask(model: Model) -> list[float]:
        answers = run_trials(model, model.policy, documents)
        return [float(outcome.found) for own in answers for outcome in own.outcomes]

    return ask
