"""Time a model (folder, hub id or GGUF file) on prefills of several lengths, under dense attention and under its plan.

The two policies take turns.
"""

import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from tessera.core import hardware
from tessera.generate import load
from tessera.measure import evidence, timing
from tessera.measure.evidence import How, Record, What
from tessera.measure.model_work import draw_tokens, fresh_seed, layer_densities, model_work, versus
from tessera.runtime.row_pool import RowPool
from tessera.sparse.baselines import Dense
from tessera.sparse.plan import THROUGHOUT

LENGTHS = (1024, 2048, 4096, 8192)
ROUNDS, LEAST, SHARE_S = 5, 3, 240.0
"""Rounds per length: ROUNDS if they fit into SHARE_S seconds, else fewer, but at least LEAST."""


def run(
    model: str | os.PathLike,
    plan: str | os.PathLike | None = None,
    *,
    lengths: Sequence[int] = LENGTHS,
    out: str | os.PathLike | None = None,
    command: str = "tessera bench --model MODEL",
    weights: str | None = None,
) -> int:
    """Time prefill of fresh random tokens, dense and under the plan; print and append two records per length.

    Args:
        model: folder, hub id or GGUF file, as for `tessera.load`.
        plan: file of the model's plan; None lets `load` find it. Tokens below its cross-over run dense, as in every
            command.
        lengths: prompt lengths in tokens; lengths beyond the model's context are skipped.
        out: file to append to; None means evidence/model-<device>.jsonl under the working folder.
        command: command line that repeats the run, for the records.
        weights: how to quantise the weight matrices, as for `tessera.load`.

    Returns:
        0.

    Raises:
        ValueError: `load` fails, or no length is within the context.
    """
    loaded = load(model, attention="kascade", plan=plan, weights=weights)
    fitting = [length for length in lengths if length <= loaded.config.max_positions]
    if not fitting:
        raise ValueError(f"{lengths=} must include one within the model's context of {loaded.config.max_positions}")
    out = Path("evidence") / f"model-{hardware.device_slug()}.jsonl" if out is None else Path(out)
    policies = {"dense": Dense(), "kascade": loaded.policy}
    pools = {  # one cache size for all lengths compiles fewer programs
        name: RowPool(loaded.params, loaded.config, policy, rows=1, num_keys=max(fitting))
        for name, policy in policies.items()
    }
    ceilings = timing.ceilings()
    reads, console = {}, Console(stderr=True, highlight=False)

    def sample(name: str, number: int, length: int) -> float:
        prompt = np.array(draw_tokens(loaded.config, fresh_seed(number), length), np.int32)
        seconds, (logits, reads[name]) = timing.time_call(pools[name].fill, prompt)
        if not np.isfinite(np.asarray(logits)).all():
            raise ValueError(f"{name} gave logits that are not finite on a timed call of {length} tokens")
        return seconds

    for length in fitting:
        contenders = {name: partial(sample, name, length=length) for name in policies}
        taken = timing.interleave(contenders, rounds=ROUNDS, until=time.monotonic() + SHARE_S, least=LEAST)
        for name in policies:
            record = _record(loaded, length, name, taken, layer_densities(reads[name]), command, ceilings)
            evidence.append(out, record)
            against = record.comparison
            said = (
                "" if against is None else f", {against.ratio:.2f}x dense, {np.mean(record.density):.0%} of keys read"
            )
            console.print(f"prefill of {length:,} tokens, {name}: {record.median:.3g} s{said}")
    return 0


def _record(
    loaded,
    length: int,
    name: str,
    taken: dict[str, list[float]],
    density: Sequence[float],
    command: str,
    ceilings: timing.Ceilings,
) -> Record:
    config = loaded.config
    ours = name == "kascade"
    rule = {name: getattr(loaded.plan, name) for name in THROUGHOUT} if ours else {}
    what = What(
        op="model",
        kernel=name,
        workload=f"own_model_{length}",
        dtype=loaded.precision,
        config={"tokens": length, "model": loaded.plan.model, "num_layers": config.num_layers} | rule,
        title=f"prefill of {Path(loaded.source).stem}, {length:,} tokens",
    )
    work, peak = model_work(config, length, density=float(np.mean(density))), ceilings.flops_per_s
    mfu = work["flops"] / (np.median(taken[name]) * peak[str(loaded.params.embed.dtype)])
    return evidence.make(
        what,
        taken[name],
        command=command,
        how=How(warmup=1, iterations=len(taken[name]), interleaved=True, check="finite logits; keys read counted"),
        work=work,
        facts={"mfu": float(mfu), "ceiling_flops_per_s": peak[str(loaded.params.embed.dtype)]},
        density=tuple(density),
        comparison=versus("dense", taken["dense"], taken["kascade"], None) if ours else None,
    )
