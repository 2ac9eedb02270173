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

from lab.passkeys import passkey_accuracy, passkey_tasks
from tessera.core import hardware
from tessera.generate import Model
from tessera.measure import evidence
from tessera.measure.evidence import How, Record, What
from tessera.measure.judge import paired, probes, texts
from tessera.measure.judge.answers import run_trials
from tessera.measure.judge.closeness import Pass, closeness, run_text
from tessera.sparse.baselines import Dense
from tessera.sparse.plan import THROUGHOUT, Plan

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
        sparse = dense.with_attention("kascade", plan, **THROUGHOUT)
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
        plan: judged without its cross-overs; None runs the caches under dense attention only.
        label: the model's name in the records.
        shipped: whether the model is the shipped one, which answers only the questions that it was trained on.
        text: text for windows and filler; the "reference" domain of `texts` if None.
        out: file of records; evidence/eval-<device>.jsonl if None.
        sizes: amount of work; SHIPPED or REAL if None.
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
    asked = shipped_questions(sizes) if shipped else real_questions(model, body, sizes)
    reference = None
    for contender in contenders(model, plan):
        if reference is None:
            reference = [run_text(contender.model, Dense(), window) for window in windows]
            found = []
        else:
            found = [on_text(contender, windows, reference, label, command)]
        for record in [*found, on_questions(contender, asked, label, command)]:
            evidence.append(out, record)
            print(f"{record.what.workload}: {record.facts['mean']:.3g} {record.unit}", flush=True)
    return 0


def on_text(
    contender: Contender, windows: Sequence[np.ndarray], reference: Sequence[Pass], label: str, command: str
) -> Record:
    """Record the KL divergence from dense attention on a float cache: one mean over tokens per window."""
    model, blocks = contender.model, []
    for window, dense in zip(windows, reference):
        ours = run_text(model, model.policy, window)
        blocks.append(closeness(model, dense.hidden, ours.hidden, window).mean(0))
    kl, _, _, agreement = np.stack(blocks, axis=1)
    how = How(iterations=len(kl), check="KL(dense on a float cache || this), mean over the tokens of each window")
    facts = {"agreement": float(agreement.mean()), "tokens": sum(map(len, windows))}
    return _record(contender, "text", kl.tolist(), "nats", how, facts, label, command)


def on_questions(contender: Contender, asked: Callable[[Model], list[float]], label: str, command: str) -> Record:
    """Record the share of questions answered right; the facts hold each question's score."""
    scores = asked(contender.model)
    how = How(iterations=len(scores), check="answers to questions about a fact hidden in a document")
    return _record(contender, "questions", scores, "fraction", how, {"scores": scores}, label, command)


def _record(contender, question, samples, unit, how, facts, label, command) -> Record:
    middle = paired.mean(samples)
    what = What(
        op="eval cache",
        kernel=contender.name,
        workload=f"{label}, {question}: {contender.title}",
        dtype=str(contender.model.params.embed.dtype),
        title=f"{label}, {contender.title}",
    )
    facts = facts | {
        "mean": float(np.mean(samples)),
        "low": middle.low,
        "high": middle.high,
        "model": label,
        "question": question,
    }
    facts |= {"attention": contender.attention, "cache": contender.cache}
    return evidence.make(what, list(samples), command=command, unit=unit, how=how, facts=facts)


def shipped_questions(sizes: Sizes) -> Callable[[Model], list[float]]:
    """Return a function that asks a model for pass keys and returns 0 or 1 for each."""
    asked = passkey_tasks(sizes.documents, sizes.length)

    def ask(model: Model) -> list[float]:
        found = passkey_accuracy(model, asked)
        return [float(index < found.num_right) for index in range(found.num_tasks)]

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
