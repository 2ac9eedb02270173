"""Calibration: run a model over text, find how many keys each layer and head must read, and build the plan.

With a target (`keep` or `max_kl`), `search.py` finds the plan that reads least and meets the target on held-out
windows. Without one, `similarity.py` runs the paper's recipe. `crossover.py` times prefill and decode on this device.
Windows of text run in chunks, so calibration takes no more memory than a prefill.
"""

import datetime
import importlib.metadata
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax

from tessera.attention.contract import AttentionSpec
from tessera.attention.selection import check_budget
from tessera.calibration.crossover import measure_crossovers
from tessera.calibration.report import Report
from tessera.calibration.search import Target, search_policy
from tessera.calibration.similarity import find_anchors
from tessera.core.files import Notebook, sources
from tessera.models.config import ModelConfig
from tessera.models.files.checkpoint import fingerprint
from tessera.runtime.corpus import Corpus, read_corpus
from tessera.sparse.ablation import Tiling
from tessera.sparse.anchors import default_anchors
from tessera.sparse.plan import HEADS, Plan, check_anchors, check_query_tile


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
    decode_crossover: int | None = None,
    max_tokens: int = 65536,
    progress: bool = True,
    notes: str | os.PathLike | None = None,
) -> Plan:
    """Find how many keys each layer and head of a model must read, make a plan, and measure its loss against dense.

    Args:
        model: any object with `params`, `config` and (for texts) `tokenizer`.
        texts: a file, a folder of text files, or a list of texts or token lists.
        keep: target: minimum share, such as 0.99, of the probability that dense attention gives the right next token,
            on held-out text and on facts planted in it. The search finds a budget per KV head that meets the target.
        max_kl: target: maximum KL(dense || plan) in nats per token, such as 0.02, on the same text and facts.
        anchors: without a target, the number of anchors (None: the paper's proportion, 5 of 32 layers, at least 2) or
            the layers themselves.
        tile, query_tile, local, sinks, minimum: fields of the plan; see `Plan`.
        fraction, heads: without a target, fields of the plan: 0.1 and "remap" if not given.
        crossover: prompt tokens below this position run dense; None measures the number on this device.
        decode_crossover: decode steps below this position run dense. None measures the number, too, but with a given
            `crossover`, that number also holds for decode.
        max_tokens: maximum number of tokens to take from the text, spread evenly over it. A search uses only some of
            these tokens.
        progress: show a progress bar on standard error.
        notes: with a target, a file that records each measurement; the same call resumes from this file after Ctrl-C, a
            kill, or a failure to save the plan. Delete the file once the plan is saved.

    Returns:
        the plan. With a target, its promise holds the measured losses, and its metrics hold the loss that ablating each
        head causes and the mean budgets tried. Without a target, its metrics hold similarity, importance, recall and
        density of the layers, and dense and sparse perplexity on held-out windows. If the cross-over is measured, the
        metrics also hold the prefill times.

    Raises:
        ValueError, FileNotFoundError: an argument, the text or the weights are unusable; the message says why.
        KeyboardInterrupt: Ctrl-C; the message says how far calibration got. No plan is written.
    """
    target = _target(keep, max_kl, anchors=anchors, fraction=fraction, heads=heads)
    fraction, heads = 0.1 if fraction is None else fraction, heads or "remap"
    check_budget(fraction, minimum, local, sinks)
    AttentionSpec(tile=tile, query_tile=query_tile)
    check_query_tile(query_tile)
    given = {"crossover": crossover or 0, "decode_crossover": decode_crossover or 0, "max_tokens": max_tokens}
    for name, value in given.items():
        if value < (least := int(name == "max_tokens")):
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
            crossovers, times = measure_crossovers(model, policy, report, crossover, decode_crossover)
            found["metrics"] |= times
    except KeyboardInterrupt:
        going_on = "; the same command resumes from here" if notebook.path is not None else ""
        raise KeyboardInterrupt(f"calibration stopped during {report.stage}; no plan was written{going_on}") from None
    return Plan(
        model=fingerprint(model.params, model.config),
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        provenance=provenance(corpus, found.pop("tokens")),
        **found,
        **asdict(replace(policy, **crossovers)),
    )


def _target(keep: float | None, max_kl: float | None, **without: Any) -> Target | None:
    """Return the target, if any; refuse arguments that only plans without a target take."""
    if keep is None and max_kl is None:
        return None
    if given := {name: value for name, value in without.items() if value is not None}:
        said = ", ".join(f"{name}={value!r}" for name, value in given.items())
        way = "drop keep and max_kl" if "anchors" in given else "pass anchors instead of a target"
        raise ValueError(
            f"{said} cannot be combined with keep or max_kl: drop {'it' if len(given) == 1 else 'them'}, or {way}"
        )
    return Target(keep=keep, max_kl=max_kl)


def _check_fit(config: ModelConfig, **sizes: int) -> None:
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
        raise ValueError(f"{anchors=} must be from 1 to {num_layers}, the number of layers, or a list of layers")
    return anchors


def subject_of(model: Any, corpus: Corpus, target: Target, tiling: Tiling) -> dict[str, Any]:
    """Return everything that determines what a search measures, so that a search resumes only from its own notes."""
    return {
        "model": fingerprint(model.params, model.config),
        "corpus": [corpus.sha256, corpus.num_tokens],
        "target": asdict(target),
        "tiling": asdict(tiling),
        "code": sources(),
        "jax": jax.__version__,
    }


def provenance(corpus: Corpus, tokens_run: int) -> dict[str, Any]:
    """Return a plan's provenance: corpus, number of corpus tokens that were run, date, versions, device."""
    return {
        "corpus": corpus.source,
        "corpus_sha256": corpus.sha256,
        "corpus_tokens": tokens_run,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "tessera": importlib.metadata.version("tessera-attention"),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }
