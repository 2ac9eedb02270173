"""Calibration: run a model over text, find the keys each layer must read, and build the plan with its evidence.

With a target (`keep` or `max_kl`), `search.py` finds the plan that reads least and still meets the target: it ablates
every KV head on text and planted facts, and held-out windows judge the result. Without a target, the paper's recipe
finds anchor layers by similarity, in four passes over windows of text: similarity and importance (which layers can
share a selection, head by head), recall (the attention mass the plan keeps), perplexity (dense against Kascade, on
held-out text), and prefill time over lengths (this device's cross-over). Windows run in chunks, so memory is that of a
prefill.
"""

import datetime
import importlib.metadata
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tessera.attention.contract import AttentionSpec
from tessera.attention.selection import check_budget
from tessera.calibration.crossover import measure_crossover
from tessera.calibration.retrieval import Probe
from tessera.calibration.search import (
    LONG,
    SHORT,
    Judge,
    Kept,
    Target,
    choose_budgets,
    measure_damage,
    measure_missed,
    policy_of,
    probes_of,
    search,
)
from tessera.core.files import Notebook, sources
from tessera.core.shapes import ceil_div
from tessera.models.checkpoint import fingerprint
from tessera.models.config import ModelConfig
from tessera.runtime.corpus import MAX_WINDOW, Corpus, read_corpus
from tessera.runtime.score import predicting, run_whole, run_window, score_rows
from tessera.sparse.ablation import Tiling
from tessera.sparse.anchors import best_heads, choose_anchors, default_anchors, head_table, mapped
from tessera.sparse.contract import Policy
from tessera.sparse.kascade import Kascade
from tessera.sparse.plan import HEADS, Plan, check_anchors
from tessera.sparse.recording import NUM_KEYS, RecallRecorder, SimilarityRecorder

HELD_OUT_STEP = 0.03
"""Increment of the mean budget while the first held-out window misses the target."""


def calibrate(
    model: Any,
    texts: str | os.PathLike | Sequence[str | Sequence[int]],
    *,
    keep: float | None = None,
    max_kl: float | None = None,
    anchors: int | Sequence[int] | None = None,
    tile: int = 16,
    query_tile: int = 32,
    local: int = 64,
    sinks: int = 16,
    fraction: float | None = None,
    minimum: int = 128,
    heads: str | None = None,
    crossover: int | None = None,
    max_tokens: int = 65536,
    progress: bool = True,
    notes: str | os.PathLike | None = None,
) -> Plan:
    """Find the keys that a model's layers and heads must read, and measure what the plan keeps.

    Args:
        model: any object with `params`, `config` and (for texts) `tokenizer`.
        texts: a file, a folder of text files, or a list of texts or token lists.
        keep: target: minimum share of dense's probability of the right next token, such as 0.99, on held-out text and
            on the answers of probes planted in it. The search finds a budget per KV head that meets it.
        max_kl: target: maximum KL(dense || plan) per token, such as 0.02, on both.
        anchors: without a target, the number of anchors (None: the paper's proportion, 5 of 32 layers, at least 2) or
            the layers themselves.
        tile, query_tile, local, sinks, minimum: fields of the plan; see `Plan`.
        fraction, heads: without a target, fields of the plan: 0.1 and "remap" if not given.
        crossover: requests below this many tokens run dense; None measures it here.
        max_tokens: maximum number of tokens to take, sampled evenly from the text; a search runs a part of them.
        progress: show a progress bar on standard error.
        notes: with a target, a file that records each measurement; the same call resumes from it after a Ctrl-C, a
            kill or a plan that could not be saved. Delete it once the plan is saved.

    Returns:
        the plan; its metrics hold similarity, importance, recall and density per layer, perplexity dense and sparse
        on held-out windows, and the times behind the cross-over.

    Raises:
        ValueError, FileNotFoundError: an argument, the text or the weights are unusable; the message says why.
        KeyboardInterrupt: Ctrl-C; the message says how far calibration got. No plan is written.
    """
    target = _target(keep, max_kl, anchors=anchors, fraction=fraction, heads=heads)
    fraction, heads = 0.1 if fraction is None else fraction, heads or "remap"
    check_budget(fraction, minimum, local, sinks)
    AttentionSpec(tile=tile, query_tile=query_tile)
    for name, value, least in (("crossover", crossover or 0, 0), ("max_tokens", max_tokens, 1)):
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    if heads not in HEADS:
        raise ValueError(f"{heads=} must be one of {HEADS}")
    always = {"tile": tile, "query_tile": query_tile, "local": local, "sinks": sinks}
    _check_fit(model.config, tile=tile, query_tile=query_tile)
    count = _check_anchors(anchors, model.config.num_layers)
    corpus = read_corpus(model, texts, max_tokens)
    report, notebook = Report(progress), Notebook()
    try:
        with report:
            if target is not None:
                tiling = Tiling(**always, minimum=minimum)
                if notes is not None:
                    notebook = Notebook(Path(notes), subject_of(model, corpus, target, tiling))
                policy, found = search_policy(model, corpus, target, tiling, report, notebook)
            else:
                fixed = always | {"heads": heads, "fraction": fraction, "minimum": minimum}
                policy, found = find_anchors(model, corpus, count, fixed, report)
            if crossover is None:
                crossover, found["metrics"]["crossover"] = measure_crossover(model, policy, report)
    except KeyboardInterrupt:
        going_on = "; the same command goes on from here" if notebook.path is not None else ""
        raise KeyboardInterrupt(f"calibration stopped during {report.stage}; no plan was written{going_on}") from None
    return Plan(
        model=fingerprint(model.params, model.config),
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        provenance=provenance(corpus, found.pop("tokens")),
        **found,
        **asdict(replace(policy, crossover_tokens=crossover)),
    )


def find_anchors(
    model: Any, corpus: Corpus, count: int | tuple[int, ...], fixed: dict[str, Any], report: "Report"
) -> tuple[Kascade, dict[str, Any]]:
    """Run the paper's recipe: choose anchors and the head map by similarity -> the policy, the plan's metrics."""
    always = {name: fixed[name] for name in ("query_tile", "local", "sinks")}
    notes = record_similarity(model, corpus.windows, heads=fixed["heads"], report=report, **always)
    chosen = choose_anchors(notes.score, count) if isinstance(count, int) else count
    policy = Kascade(anchors=chosen, head_map=_head_map(notes.heads, chosen, model.config), **fixed)
    metrics = notes.metrics() | measure_policy(model, policy, corpus.held_out, report)
    return policy, {"metrics": metrics, "tokens": corpus.num_tokens}


def search_policy(
    model: Any, corpus: Corpus, target: Target, tiling: Tiling, report: "Report", notebook: Notebook
) -> tuple[Kascade, dict[str, Any]]:
    """Find the policy that reads least and meets the target -> policy, the plan's promise and metrics, tokens run.

    While the first held-out window misses the target, the mean budget grows by HELD_OUT_STEP. The promise is what the
    policy keeps of a second one; if there is none, of the first, and the promise says that this set the budget.
    """
    windows = corpus.windows[:: ceil_div(len(corpus.windows), 2)]
    ablated, chosen_on = probes_of(model, windows, SHORT, 0), probes_of(model, windows[:1], LONG, 1)
    held_out = probes_of(model, corpus.held_out[:2], MAX_WINDOW, 2)  # a window too short for its facts is named first
    damage = measure_damage(model, ablated, tiling, report.each, notebook)
    missed = notebook.keep("missed mass", lambda: measure_missed(model, chosen_on, tiling, report.each).tolist())
    missed = np.asarray(missed)
    tried = search(damage, missed, Judge(model, chosen_on), tiling, target, report.each, notebook)
    mean, judge = tried[-1].mean, Judge(model, held_out[:1])
    for _ in report.each("held-out text", range(round((1 - mean) / HELD_OUT_STEP) + 1)):
        policy = policy_of(choose_budgets(damage, missed, mean), tiling)
        kept = judge.noted(notebook, f"held-out text, mean budget {mean}", policy)
        if target.holds(kept) or mean >= 1:
            break
        mean = min(mean + HELD_OUT_STEP, 1.0)
    fresh = held_out[1:]
    if fresh:
        kept = Judge(model, fresh).noted(notebook, "new text", policy)
    promise = promise_of(target, fresh or held_out, kept, fresh=bool(fresh))
    metrics = {
        "damage": _rounded(damage),
        "tried": [{"mean_budget": _rounded(one.mean), **one.kept.metrics()} for one in tried],
    }
    run = [*chosen_on, *ablated[1:], *held_out]  # the first ablated window is the start of the one that chooses
    return policy, {"promise": promise, "metrics": metrics, "tokens": sum(len(probe.tokens) for probe in run)}


def promise_of(target: Target, judged: Sequence[Probe], kept: Kept, *, fresh: bool) -> dict[str, Any]:
    """Return the plan's promise: the target, the windows that judged it, whether they set no budget, what it keeps."""
    return {
        **{name: value for name, value in asdict(target).items() if value is not None},
        "judged_tokens": [len(probe.tokens) for probe in judged],
        "fresh": fresh,
        "held": target.holds(kept),
        "measured": kept.metrics(),
    }


def _target(keep: float | None, max_kl: float | None, **without: Any) -> Target | None:
    """Return the target, if any; refuse arguments that only plans without a target take."""
    if keep is None and max_kl is None:
        return None
    if given := {name: value for name, value in without.items() if value is not None}:
        said = ", ".join(f"{name}={value!r}" for name, value in given.items())
        way = "drop keep and max_kl" if "anchors" in given else "pass anchors instead of a target"
        raise ValueError(
            f"{said} must not stand with keep or max_kl: drop {'it' if len(given) == 1 else 'them'}, or {way}"
        )
    return Target(keep=keep, max_kl=max_kl)


def _check_fit(config: ModelConfig, **sizes: int) -> None:
    """Raise ValueError if a tile is longer than the context."""
    for name, size in sizes.items():
        if size > config.max_positions:
            raise ValueError(f"{name}={size} does not fit the context of {config.max_positions}: choose a smaller one")


def _check_anchors(anchors: int | Sequence[int] | None, num_layers: int) -> int | tuple[int, ...]:
    """Return the number of anchors to find, or the requested layers."""
    if anchors is None:
        return default_anchors(num_layers)
    if not isinstance(anchors, int):
        check_anchors(tuple(anchors), num_layers)
        return tuple(anchors)
    if not 1 <= anchors <= num_layers:
        raise ValueError(f"{anchors=} must be from 1 to {num_layers}, the model's layers, or a list of layers")
    return anchors


def _head_map(heads_LLK: np.ndarray, anchors: tuple[int, ...], config: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """Build the plan's head map. A recorder that pooled all heads has one column; each head then maps to itself."""
    if heads_LLK.shape[-1] == config.num_kv_heads:
        return head_table(heads_LLK, anchors)
    return (tuple(range(config.num_kv_heads)),) * config.num_layers


def subject_of(model: Any, corpus: Corpus, target: Target, tiling: Tiling) -> dict[str, Any]:
    """Return everything that determines what a search measures; a notebook with another subject starts over."""
    return {
        "model": fingerprint(model.params, model.config),
        "corpus": [corpus.sha256, corpus.num_tokens],
        "target": asdict(target),
        "tiling": asdict(tiling),
        "code": sources(),
        "jax": jax.__version__,
    }


def provenance(corpus: Corpus, tokens_run: int) -> dict[str, Any]:
    """Describe where a plan comes from: corpus, the tokens of it that were run, date, versions, device."""
    return {
        "corpus": corpus.source,
        "corpus_sha256": corpus.sha256,
        "corpus_tokens": tokens_run,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "tessera": importlib.metadata.version("tessera-attention"),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }


class Report:
    """Progress bar with one line per pass; `stage` names the current pass, for the message after Ctrl-C."""

    def __init__(self, shown: bool):
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=Console(stderr=True), disable=not shown)
        self.stage = "reading"

    def __enter__(self) -> "Report":
        self.bar.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.bar.stop()

    def each(self, stage: str, items: Sequence[Any]) -> Iterator[Any]:
        """Iterate over the items and advance the bar."""
        self.stage = stage
        task = self.bar.add_task(stage, total=len(items))
        for item in items:
            yield item
            self.bar.advance(task)


def attention_mass(model: Any, window: np.ndarray, recorder: RecallRecorder, num_keys: int) -> tuple[np.ndarray, float]:
    """Run one window -> attention mass [2,L,K] on the keys the policy reads and on all keys, sum of -ln p."""
    hidden, notes = run_whole(model, window, recorder, num_keys=num_keys)
    mass = np.sum([(own.held, own.total) for own in notes], axis=0, dtype=np.float64)
    return mass, text_loss(model, hidden, window)


def text_loss(model: Any, hidden: np.ndarray, window: np.ndarray) -> float:
    """Return the sum of -ln p over the predicted tokens of a window, in nats."""
    return float(score_rows(model, hidden, window, predicting(window)).loss.sum(dtype=np.float64))


def perplexity(model: Any, windows: Sequence[np.ndarray], policy: Policy) -> float:
    """Return exp of the mean -ln p over all predicted tokens of the windows."""
    longest = max(len(window) for window in windows)
    runs = ((run_whole(model, window, policy, num_keys=longest)[0], window) for window in windows)
    total = sum(text_loss(model, hidden, window) for hidden, window in runs)
    return math.exp(total / sum(len(window) - 1 for window in windows))


@dataclass(frozen=True, kw_only=True)
class Notes:
    """Results of the similarity pass, for layers a and b.

    Attributes:
        heads: [L,L,K'] the head of a that each head of b would use.
        similarity: [L,L] sim(a, b): minimum over a window's query tiles, mean over windows and heads.
        importance: [L] mean of 1 - cos of the residual stream around the attention block.
    """

    heads: np.ndarray
    similarity: np.ndarray
    importance: np.ndarray

    @property
    def score(self) -> np.ndarray:
        """S[a][b] = importance of b times similarity(a, b), [L,L]."""
        return self.importance * self.similarity

    def metrics(self) -> dict[str, Any]:
        """Return the pass's entries in the plan's metrics."""
        return {
            "similarity": _rounded(np.triu(self.similarity)),
            "importance": _rounded(self.importance),
            "similarity_keys": NUM_KEYS,
        }


def record_similarity(
    model: Any,
    windows: Sequence[np.ndarray],
    query_tile: int,
    heads: str,
    report: Report,
    *,
    local: int = 0,
    sinks: int = 0,
) -> Notes:
    """Measure the similarity of all pairs of layers and heads, and each layer's importance, over the windows."""
    recorder = SimilarityRecorder(query_tile=query_tile, local=local, sinks=sinks, pooled=heads == "pooled")
    longest = max(len(window) for window in windows)
    turned, num_tokens, minima = 0.0, 0, []
    for window in report.each("similarity", windows):
        least = None
        for chunk in run_window(model, window, recorder, num_keys=longest):
            state = jax.device_get(chunk.notes)
            turned = turned + np.asarray(state.turned, np.float64)
            num_tokens += int(state.num_tokens)
            if state.num_tiles:
                minimum = np.asarray(state.least, np.float64)
                least = minimum if least is None else np.minimum(least, minimum)
        if least is not None:
            minima.append(least)
    if not np.isfinite(turned).all():
        raise ValueError("the model's activations are not finite on this text: its weights may hold NaN")
    if not minima:
        raise ValueError(f"no text is long enough to choose from more than {NUM_KEYS} keys that are not read anyway")
    similarity = np.mean(minima, axis=0)
    own = np.broadcast_to(np.arange(similarity.shape[-1]), similarity.shape[:3])
    table = best_heads(similarity) if heads == "remap" else own
    return Notes(heads=table, similarity=mapped(similarity, table), importance=turned / num_tokens)


def measure_policy(model: Any, policy: Kascade, windows: Sequence[np.ndarray], report: Report) -> dict[str, Any]:
    """Measure recall of attention mass and density per layer, and dense and sparse perplexity, on held-out windows."""
    longest = max(len(window) for window in windows)
    mass, read, visible = 0.0, 0.0, 0.0
    dense_loss = sparse_loss = 0.0
    for window in report.each("recall", windows):
        found, loss = attention_mass(model, window, RecallRecorder(policy=policy, dense=True), longest)
        mass, dense_loss = mass + found.sum(-1), dense_loss + loss
    for window in report.each("perplexity", windows):
        hidden, notes = run_whole(model, window, policy, num_keys=longest)
        sparse_loss += text_loss(model, hidden, window)
        for counted in map(policy.reads, notes):
            read = read + np.asarray(counted.read, np.float64).sum(1)
            visible = visible + np.asarray(counted.visible, np.float64).sum(1)
    num_predicted = sum(len(window) - 1 for window in windows)
    return {
        "recall": _rounded(mass[0] / mass[1]),
        "density": _rounded(read / visible),
        "held_out_tokens": num_predicted,
        "perplexity_dense": _rounded(math.exp(dense_loss / num_predicted)),
        "perplexity_kascade": _rounded(math.exp(sparse_loss / num_predicted)),
    }


def _rounded(value: Any) -> Any:
    """Round to four significant digits: people read plans too."""
    if isinstance(value, np.ndarray):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}")
