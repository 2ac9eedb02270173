"""The demo's measurements: answers, pass keys, time to first token, attention time, and keys that each layer reads."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lab.demo.pictures import Anchor
from lab.eval import quality
from lab.eval.quality import Accuracy, passkey_tasks
from tessera.attention import dispatch
from tessera.attention.contract import AttentionSpec, KeyValues, Positions
from tessera.core.shapes import ceil_div
from tessera.generate import Model
from tessera.measure import timing
from tessera.measure.judge.library import library_corpus
from tessera.runtime import score
from tessera.runtime.answers import Generation
from tessera.runtime.sampling import GREEDY
from tessera.sparse.kascade import Kascade

Progress = Callable[[str], Any]


@dataclass(frozen=True, kw_only=True)
class Answered:
    """One question with each policy's answer. A regular expression, not a model, finds `expected` in the document."""

    question: str
    expected: str
    dense: Generation
    kascade: Generation
    control: Generation

    @property
    def same(self) -> bool:
        """Whether dense and Kascade gave the same tokens."""
        return self.dense.tokens == self.kascade.tokens

    @property
    def right(self) -> bool:
        """Whether the answers of dense and of Kascade both equal `expected`."""
        return all(answer.text.strip() == self.expected for answer in (self.dense, self.kascade))


def ask(models: Mapping[str, Model], document: str, subject: str) -> Answered:
    """Ask each model for a fact that the document states.

    Args:
        models: name -> model: "dense", "kascade" and "control".
        document: the text; the question follows it.
        subject: a constant that the document defines ("SMTP_PORT"), or the subject of a note in it ("the pass key").

    Raises:
        ValueError: the document does not state the fact.
    """
    expected = what_it_says(document, subject)[0]
    prompt = make_prompt(document, subject)
    how = {"max_new_tokens": 48, "stop": ("\n",), **GREEDY}
    answers = {key: model.generate([prompt], **how)[0] for key, model in models.items()}
    return Answered(question=f"What is {subject}?", expected=expected, **answers)


def make_prompt(document: str, subject: str) -> str:
    """Join the document and the question in the format of the training data."""
    return f"{document.rstrip()}\n\nWhat is {subject}? "


def what_it_says(document: str, subject: str) -> tuple[str, int]:
    """Return the document's answer, in the wording that the model is trained on, and its position in characters."""
    if subject.startswith("the "):
        pattern = rf"The {re.escape(subject[4:])} is [^\s.]+\."
    else:
        pattern = rf"^\s*{re.escape(subject)} *= *[^\s,;#]+"
    found = re.search(pattern, document, re.MULTILINE)
    if found is None:
        raise ValueError(
            f"{subject=} is not in the document: use a constant that it defines, or a noted fact ('the pass key')"
        )
    return " ".join(found[0].split()), found.start()


def passkey_accuracy(
    models: Mapping[str, Model], lengths: Sequence[int], num_tasks: int, progress: Progress
) -> dict[str, dict[int, Accuracy]]:
    """Count the hidden five-digit keys that each policy finds exactly, per prompt length.

    All policies get the same tasks.
    """
    found = {name: {} for name in models}
    for length in lengths:
        tasks = passkey_tasks(num_tasks, length)
        for name, model in models.items():
            progress(f"{num_tasks} pass keys in {length:,} tokens, {name}")
            found[name][length] = quality.passkey_accuracy(model, tasks, batch=1)
    return found


def first_token_times(
    models: Mapping[str, Model], lengths: Sequence[int], repeats: int, progress: Progress
) -> dict[int, dict[str, list[float]]]:
    """Return the seconds to the first token of held-out library text, by prompt length and policy.

    Every sample uses another piece of the text, and the policies take turns.
    """
    text = library_corpus().held_out
    rng = np.random.default_rng(21)
    out = {}
    for length in lengths:
        progress(f"time to first token, {length:,} tokens")

        def sample(model: Model, number: int, length=length) -> float:
            start = int(rng.integers(0, len(text) - length))
            return model.generate([text[start : start + length].tolist()], max_new_tokens=1, **GREEDY)[0].ttft_s

        contenders = {name: partial(sample, model) for name, model in models.items()}
        out[length] = timing.interleave(contenders, rounds=repeats)
    return out


class LayerTimes(NamedTuple):
    """Seconds of one layer's attention: for each kind of layer (see `kinds`), one sample per repeat."""

    samples: Mapping[str, Sequence[float]]

    def total(self, layers: Sequence[str]) -> dict[str, float]:
        """Sum the median times of a model's layers.

        The sum "dense" treats all layers as dense; the sum "kascade" uses the kinds in `layers`.
        """
        median = {kind: float(np.median(samples)) for kind, samples in self.samples.items()}
        return {"dense": median["dense"] * len(layers), "kascade": sum(median[kind] for kind in layers)}


def kinds(policy: Kascade) -> tuple[str, ...]:
    """Return each layer's kind: its role, and the budgets of its heads if the role is "own" or "sparse".

    Layers of the same kind take the same time.
    """
    rows = policy.budgets or ((),) * len(policy.head_map)
    listed = (f" {' '.join(f'{budget:g}' for budget in row)}" if row else "" for row in rows)
    return tuple(role if role in ("dense", "score") else role + words for role, words in zip(policy.roles(), listed))


def attention_times(model: Model, lengths: Sequence[int], repeats: int, progress: Progress) -> dict[int, LayerTimes]:
    """Time the causal prefill attention of one dense layer, and of one layer of each kind in the plan (see `kinds`).

    The shapes come from the model's heads and the plan's tiles. The time of a layer that chooses tiles includes the
    choice. Inputs are random, because the time does not depend on their values.
    """
    config, policy = model.config, model.policy
    spec, found = AttentionSpec(tile=policy.tile, query_tile=policy.query_tile), kinds(policy)
    first = {kind: found.index(kind) for kind in dict.fromkeys(found)}
    sources = {kind: max(n for n in range(at + 1) if not policy.roles()[n] == "sparse") for kind, at in first.items()}

    def run(layer: int, q, kv, state):
        where = Positions(*(jnp.full(1, n, jnp.int32) for n in (0, q.shape[1], q.shape[1])))
        return policy.attend(layer, q, kv, spec, where, state)

    programs = {kind: jax.jit(partial(run, at)) for kind, at in first.items()}
    choosing = {kind: jax.jit(partial(run, sources[kind])) for kind, at in first.items() if sources[kind] != at}
    dense = jax.jit(lambda q, kv: dispatch.attend(q, kv, spec).out)
    out = {}
    for length in lengths:
        progress(f"attention of one layer, {length:,} tokens")
        shape = (1, config.num_kv_heads, length, config.head_dim)
        shapes = ((1, length, config.num_heads, config.head_dim), shape, shape)
        keys = jax.random.split(jax.random.key(length), 3)
        q, *kv = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes))
        kv = KeyValues(*kv)
        empty = policy.init_state(len(found), kv.shapes(q), spec)
        states = {kind: choosing[kind](q, kv, empty)[1] if kind in choosing else empty for kind in first}
        calls = {"dense": (dense, q, kv)}
        calls |= {kind: (program, q, kv, states[kind]) for kind, program in programs.items() if kind != "dense"}

        def sample(call, number: int) -> float:
            return timing.time_call(*call)[0]

        contenders = {name: partial(sample, call) for name, call in calls.items()}
        out[length] = LayerTimes(timing.interleave(contenders, rounds=repeats))
    return out


class ReadMap(NamedTuple):
    """Keys that a prompt's prefill read: the share of the visible keys per layer, and the tiles that layers chose."""

    densities: list[float]
    anchors: list[Anchor]


def read_map(model: Model, tokens: Sequence[int]) -> ReadMap:
    """Run the prompt once with a policy that also keeps the selection of every layer that chooses."""
    tracing = _Tracing(**(vars(model.policy) | {"crossover_tokens": 0}))
    _, notes = score.run_whole(model, np.asarray(tokens), tracing)
    read, visible = (np.sum([count[:, 0] for count in counts], 0) for counts in zip(*map(tracing.reads, notes)))
    chosen = jax.tree.map(lambda *parts: np.concatenate(parts, axis=2), *(seen for _, seen in notes))  # query tiles
    scored = [layer for layer in range(model.config.num_layers) if tracing.chooses(layer)]
    shape = (ceil_div(len(tokens), tracing.query_tile), ceil_div(len(tokens), tracing.tile))
    anchors = [
        Anchor(layer=layer, heads_BY=_count_heads(choice, shape, tracing), num_heads=model.config.num_kv_heads)
        for layer, choice in zip(scored, chosen)
    ]
    return ReadMap((read / visible).tolist(), anchors)


def _count_heads(selection, shape: tuple[int, int], policy: Kascade) -> np.ndarray:
    """Return how many KV heads list each key tile, [query tiles, key tiles]; -1 where the key tile is in the future."""
    tiles, count = selection.tiles[0], selection.count[0, :, : shape[0]]  # without the last chunk's padding
    heads = np.zeros(shape, np.int32)
    for head, row in np.ndindex(*count.shape):
        heads[row, tiles[head, row, : count[head, row]]] += 1
    last = (np.arange(shape[0])[:, None] + 1) * policy.query_tile - 1
    return np.where(np.arange(shape[1]) * policy.tile > last, -1, heads)


@dataclass(frozen=True, kw_only=True)
class _Tracing(Kascade):
    """Kascade policy that also returns the tiles that its layers chose; it needs unrolled layers."""

    def chooses(self, layer: int) -> bool:
        """Return whether a layer ranks tiles: its role is "score", or "own" with a head budget between 0 and 1."""
        role = self.roles()[layer]
        budgets = self.budgets[layer] if self.budgets else (self.fraction,)
        return role == "score" or role == "own" and any(0 < budget < 1 for budget in budgets)

    def init_state(self, num_layers, shapes, spec):
        return super().init_state(num_layers, shapes, spec), ()

    def attend(self, layer, q, kv, spec, positions, state):
        inner, seen = state
        out, inner = super().attend(layer, q, kv, spec, positions, inner)
        if self.chooses(layer):
            choice = inner.choice  # masses instead of tiles if the plan has budgets
            if self.budgets:
                choice = self.select(layer, choice, self._spec(spec), positions, kv.shapes(q))
            seen = (*seen, choice)
        return out, (inner, seen)

    def reads(self, state):
        return super().reads(state[0])
