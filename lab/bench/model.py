"""Benchmark the whole model: speed against transformers, Kascade against dense, memory, compilation, start-up."""

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from lab.bench.amdahl import AttentionAlone, predict
from lab.bench.child import run_child
from lab.bench.stand import REST_S, Stand
from tessera import generate
from tessera.calibration.crossover import find_crossover
from tessera.core.files import DEMO_MODEL
from tessera.core.shapes import ceil_div
from tessera.measure import timing
from tessera.measure.evidence import How, Record, What
from tessera.measure.model_work import draw_tokens, fresh_seed, layer_densities, model_work, versus
from tessera.models.config import ModelConfig
from tessera.models.files.checkpoint import fingerprint, load_params
from tessera.models.files.source import open_source
from tessera.models.layers import Params
from tessera.runtime.row_pool import RowPool
from tessera.runtime.sampling import GREEDY
from tessera.runtime.step import prefill_chunk
from tessera.sparse.baselines import Dense
from tessera.sparse.contract import Policy, Reads
from tessera.sparse.plan import THROUGHOUT, Plan
from tessera.sparse.policies import policy_for


def synthetic_plan(params: Params, config: ModelConfig) -> Plan:
    """Build a plan with evenly spaced anchors, for timing only: random weights leave calibration nothing to find.

    The paper's plan for Llama-3.1-8B has 5 anchors in 32 layers (arXiv 2512.16391). This plan rounds that share up and
    adds one anchor, since the dense layer 0 weighs more in a model with few layers.
    """
    count = ceil_div(config.num_layers * 5, 32) + 1
    anchors = tuple(sorted({index * config.num_layers // count for index in range(count)}))
    return Plan(
        model=fingerprint(params, config),
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        anchors=anchors,
        head_map=tuple(tuple(range(config.num_kv_heads)) for _ in range(config.num_layers)),
        tile=64,
        query_tile=32,
        provenance={"kind": "synthetic: evenly spaced anchors, random weights, for timing only"},
    )


def kascade_prefill(stand: Stand) -> Iterator[Record]:
    """Measure time to first token of a long prompt: Kascade against our dense attention, with the same weights.

    Each policy's attention calls are also timed once without the rest of the model. Amdahl's law predicts a gain from
    those times, and Kascade's record holds the prediction.
    """
    config, length = stand.sizes.config, stand.sizes.long_tokens
    dense = generate.load(stand.folder)
    plan = synthetic_plan(dense.params, config)
    models = {"dense": dense, "kascade": replace(dense, policy=policy_for("kascade", config, plan), plan=plan)}
    densities = {name: [] for name in models}

    def sample(name: str, number: int) -> float:
        prompt = draw_tokens(config, fresh_seed(number), length)
        [answer] = models[name].generate([prompt], max_new_tokens=1, **GREEDY)
        if not math.isfinite(answer.logprobs[0]):
            raise ValueError(f"{name} gave logprob {answer.logprobs[0]} on a timed call: the output must be finite")
        densities[name].append(answer.layer_density)
        return answer.ttft_s

    alone = {}
    for name, model in models.items():  # compile on empty input and warm up on 64 tokens: a long prompt takes a minute
        pool = model.pool(model.policy, num_keys=length)
        pool.warm(scores=False)
        model.generate([draw_tokens(config, 0, 64)], max_new_tokens=1, **GREEDY)
        alone[name] = AttentionAlone(pool, length)
    samplers = {name: attention.sample for name, attention in alone.items()}
    attention_s = timing.interleave(samplers, rounds=1, warmup=0, rest_s=REST_S)
    contenders = {name: partial(sample, name) for name in models}
    taken = stand.interleave(contenders, least=1, warmup=0, rest_s=REST_S)
    layers = {name: tuple(np.mean(values, axis=0).tolist()) for name, values in densities.items()}
    density = {name: float(np.mean(values)) for name, values in layers.items()}
    density["kascade attention"] = alone["kascade"].density
    if not max(density["kascade"], density["kascade attention"]) < 0.9 * density["dense"]:
        raise ValueError(f"{density=}: Kascade must read fewer keys than dense, but this run reads about as many")
    amdahl = predict(taken["dense"], attention_s)
    settings = {"tokens": length, **_shape(config)}
    checked = "finite first token; keys read counted"
    how = How(warmup=1, iterations=len(taken["dense"]), interleaved=True, check=checked)
    for name, target in (("dense", None), ("kascade", 1.5)):
        chosen = {"anchors": list(plan.anchors), "tile": plan.tile, "plan": "synthetic"} if name == "kascade" else {}
        yield stand.record(
            What(
                op="model",
                kernel=name,
                workload="kascade_prefill",
                dtype="float32",
                config=settings | chosen,
                title=f"whole model, time to first token, {length:,} tokens, {_words(config)}",
            ),
            taken[name],
            how,
            work=model_work(config, length, density=density[name]),
            density=layers[name],
            comparison=versus("dense", taken["dense"], taken["kascade"], target) if target else None,
            facts=amdahl if name == "kascade" else {},
        )


def crossover(stand: Stand) -> Iterator[Record]:
    """Time the shipped model's prefill at several lengths: Kascade under the shipped plan against our dense attention.

    The last record holds the cross-over: the shortest length from which Kascade stays faster (`find_crossover`), or
    null if Kascade is not faster at the longest length. Lengths beyond the model's context are valid for timing only.
    """
    shipped = generate.load(DEMO_MODEL, attention="kascade")
    policies = {"dense": Dense(), "kascade": replace(shipped.policy, **THROUGHOUT)}
    lengths = stand.sizes.crossover_tokens
    config = replace(shipped.config, max_positions=max(lengths))
    medians: dict[str, list[float]] = {name: [] for name in policies}
    for length in lengths:
        longest = length == lengths[-1]
        interleave = partial(stand.interleave, least=1) if longest else stand.interleave
        taken, layers = time_lengths(shipped.params, config, policies, length, interleave)
        density = {name: float(np.mean(values)) for name, values in layers.items()}
        if longest and not density["kascade"] < 0.9 * density["dense"]:
            raise ValueError(f"{density=}: Kascade must read fewer keys than dense, but this run reads about as many")
        facts = {}
        for name in policies:
            medians[name].append(float(np.median(taken[name])))
        if longest:
            found = find_crossover(lengths, medians["dense"], medians["kascade"])
            facts = {"crossover_tokens": found, "lengths": list(lengths)}
            facts |= {f"{name}_s": values for name, values in medians.items()}
        for name in policies:
            ours = name == "kascade"
            yield stand.record(
                What(
                    op="model",
                    kernel=name,
                    workload=f"crossover_{length}",
                    dtype="float32",
                    config={"tokens": length, **_shape(config)} | ({"plan": "shipped"} if ours else {}),
                    title=f"prefill of the demo model, {length:,} tokens, {_words(config)}",
                ),
                taken[name],
                How(warmup=1, iterations=len(taken[name]), interleaved=True, check="finite logits; keys read counted"),
                work=model_work(config, length, density=density[name]),
                density=layers[name],
                comparison=versus("dense", taken["dense"], taken["kascade"], None) if ours else None,
                facts=facts if ours else {},
            )


def time_lengths(
    params: Params,
    config: ModelConfig,
    policies: Mapping[str, Policy],
    length: int,
    interleave: Callable[..., dict[str, list[float]]],
) -> tuple[dict[str, list[float]], dict[str, tuple[float, ...]]]:
    """Time prefills of `length` random tokens; the policies take turns.

    Returns:
        Two dicts by policy name: the seconds per round, and the share of visible keys that each layer read.
    """
    pools = {name: RowPool(params, config, policy, rows=1, num_keys=length) for name, policy in policies.items()}
    reads: dict[str, Sequence[Reads]] = {}

    def sample(name: str, number: int) -> float:
        prompt = draw_tokens(config, fresh_seed(number), length)
        seconds, (logits, reads[name]) = timing.time_call(pools[name].fill, np.array(prompt, np.int32))
        if not np.isfinite(np.asarray(logits)).all():
            raise ValueError(f"{name} gave logits that are not finite on a timed call of {length} tokens")
        return seconds

    contenders = {name: partial(sample, name) for name in policies}
    taken = interleave(contenders, rest_s=REST_S)
    return taken, {name: layer_densities(counted) for name, counted in reads.items()}


def peer_model(stand: Stand) -> Iterator[Record]:
    """Measure time to first token and decode speed against transformers with the same weights and prompts.

    Raises:
        ValueError: transformers is not available for comparison, or its first tokens differ from ours.
    """
    if reason := stand.peer_refusal:
        raise ValueError(f"cannot compare with transformers: {reason}")
    config, length, steps = stand.sizes.config, stand.sizes.short_tokens, stand.sizes.decode_steps
    ours = generate.load(stand.folder)
    stand.peer.ask("load", folder=str(stand.folder), dtype="float32")
    taken = {name: {"prefill": [], "decode": []} for name in ("ours", "peer")}
    tokens: dict[tuple[str, int], list[int]] = {}

    def note(side: str, number: int, prefill_s: float, decode_s: float, answer: list[int]) -> float:
        tokens[side, number] = answer
        if number >= 0:
            taken[side]["prefill"].append(prefill_s)
            taken[side]["decode"].append(decode_s)
        return prefill_s + decode_s

    def run_ours(number: int) -> float:
        prompt = draw_tokens(config, fresh_seed(number), length)
        [answer] = ours.generate([prompt], max_new_tokens=steps + 1, **GREEDY)
        return note("ours", number, answer.ttft_s, 1 / answer.decode_tokens_per_s, answer.tokens)

    def run_peer(number: int) -> float:
        prompt = draw_tokens(config, fresh_seed(number), length)
        first = stand.peer.ask("prefill", tokens=prompt)
        rest = stand.peer.ask("decode", steps=steps)
        answer = [first["token"], *rest["tokens"]]
        return note("peer", number, first["seconds"], rest["seconds"] / steps, answer)

    rounds = stand.interleave({"ours": run_ours, "peer": run_peer}, rest_s=REST_S)
    pairs = [(tokens["ours", n], tokens["peer", n]) for n in range(len(rounds["ours"]))]
    equal = float(np.mean([a == b for one, other in pairs for a, b in zip(one, other)]))
    if any(one[0] != other[0] for one, other in pairs):
        raise ValueError(f"a first token differs from the peer's on a timed call; {equal:.1%} of all tokens are equal")
    yield from _peer_records(stand, taken, equal)


def _peer_records(stand: Stand, taken: dict[str, dict[str, list[float]]], equal: float) -> Iterator[Record]:
    config, length, steps = stand.sizes.config, stand.sizes.short_tokens, stand.sizes.decode_steps
    how = How(
        warmup=1,
        iterations=len(taken["ours"]["prefill"]),
        interleaved=True,
        check="first token of every call equal on both sides",
    )
    works = {"prefill": model_work(config, length), "decode": model_work(config, 1, past=length)}
    titles = {
        "prefill": f"whole model, time to first token, {length:,} tokens, {_words(config)}",
        "decode": f"whole model, one decoded token at {length:,}, {_words(config)}",
    }
    versions = {name: stand.peer_versions[name] for name in ("torch", "transformers", "threads")}
    for phase, target in (("prefill", 1.3), ("decode", 1.0)):
        for side, kernel in (("peer", "transformers"), ("ours", "dense")):
            yield stand.record(
                What(
                    op="model",
                    kernel=kernel,
                    workload=f"peer_model_{phase}",
                    dtype="float32",
                    config={"tokens": length, "decode_steps": steps, **_shape(config)},
                    title=titles[phase],
                ),
                taken[side][phase],
                how,
                work=works[phase],
                comparison=None
                if side == "peer"
                else versus("transformers", taken["peer"][phase], taken["ours"][phase], target),
                facts=versions if side == "peer" else {"equal_tokens": equal},
            )


def prefill_memory(stand: Stand) -> Iterator[Record]:
    """Measure the peak memory of prefill at several lengths, each in a fresh process.

    The figure is the peak minus the peak for a 64-token prompt.
    """
    config = replace(stand.sizes.config, num_layers=2)
    folder = stand.write_model(config, "memory")
    weights = [_weigh(folder, length) for length in (64, *stand.sizes.memory_tokens)]
    extra = [weight - weights[0] for weight in weights[1:]]
    lengths = stand.sizes.memory_tokens
    slope, offset = np.polyfit(lengths, extra, 1)
    exponent = float(np.polyfit(np.log(lengths), np.log(np.maximum(extra, 1)), 1)[0])
    worst = float(np.max(np.abs(slope * np.array(lengths) + offset - extra)) / max(extra))
    growth = {"slope_bytes_per_token": float(slope), "growth_exponent": exponent, "worst_residual": worst}
    for length, weight in zip(lengths, extra):
        yield stand.record(
            What(
                op="memory",
                kernel="peak above a 64-token prompt",
                workload=f"prefill_memory_{length}",
                config={"tokens": length, **_shape(config)},
                title=f"memory of prefill, {length:,} tokens, {_words(config)}",
            ),
            [float(weight)],
            How(cold_cache="a process each", check="line and power law fitted over all lengths"),
            unit="bytes",
            facts=growth if length == lengths[-1] else {},
        )


def _weigh(folder, length: int) -> int:
    code = "import sys; from lab.bench import model; model.answer_once(sys.argv[1], int(sys.argv[2]))"
    child = run_child(code, str(folder), str(length))
    if child.status or child.peak_bytes is None:
        raise RuntimeError(f"prefill of {length} tokens ended with status {child.status}: {child.stderr[-300:]}")
    return child.peak_bytes


def answer_once(folder: str, length: int) -> None:
    """Load the model and answer one random prompt with one token. `_weigh` and `start_up` run it in child processes."""
    model = generate.load(folder)
    [answer] = model.generate([draw_tokens(model.config, 1, length)], max_new_tokens=1, **GREEDY)
    if not math.isfinite(answer.logprobs[0]):
        raise ValueError(f"logprob {answer.logprobs[0]} of the generated token must be finite")


def compilation(stand: Stand) -> Iterator[Record]:
    """Measure compile time and step time of one prefill chunk, with layers under lax.scan and unrolled."""
    config, rows = stand.sizes.config, stand.sizes.start_tokens
    lower, steps, pools = {}, {}, {}
    for name in ("scan", "unrolled"):
        params = load_params(open_source(stand.folder), dtype=jnp.float32, stacked=name == "scan")
        pools[name] = RowPool(params, config, Dense(), rows=1, num_keys=rows)
        positions = (np.zeros(1, np.int32), np.full(1, rows, np.int32))
        given = (params, pools[name].cache, np.zeros((1, rows), np.int32), *positions)
        lower[name] = partial(prefill_chunk.lower, *given, config=config, policy=Dense())

    def compile_anew(name: str, number: int) -> float:
        jax.clear_caches()  # otherwise JAX finds the same program already compiled
        lowered = lower[name]()
        seconds, steps[name] = timing.time_call(lowered.compile)
        return seconds

    def step(name: str, number: int) -> float:
        pool = pools[name]
        tokens = np.array([draw_tokens(config, fresh_seed(number), rows)], np.int32)
        arguments = (tokens, np.zeros(1, np.int32), np.full(1, rows, np.int32))
        seconds, (pool.cache, _, _) = timing.time_call(steps[name], pool.params, pool.cache, *arguments)
        return seconds

    compile_s = stand.interleave({name: partial(compile_anew, name) for name in lower}, warmup=0)
    taken = stand.interleave({name: partial(step, name) for name in steps}, rest_s=REST_S)
    for name in steps:
        yield stand.record(
            What(
                op="compile",
                kernel=name,
                workload="compilation",
                dtype="float32",
                config={"tokens": rows, **_shape(config)},
                title=f"compiling one prefill chunk of {rows:,} rows, {_words(config)}",
            ),
            compile_s[name],
            How(iterations=len(compile_s[name]), interleaved=True, cold_cache="caches emptied, the persistent one off"),
            facts={"step_s": float(np.median(taken[name])), "step_samples_s": taken[name]},
        )


def start_up(stand: Stand) -> Iterator[Record]:
    """Time a process that loads the model and generates one token, from start to exit; each sample is a new process.

    The contenders are an empty and a filled compilation cache.
    """
    config, length = stand.sizes.config, stand.sizes.start_tokens
    code = "import sys; from lab.bench import model; model.answer_once(sys.argv[1], int(sys.argv[2]))"

    def start(cache: str) -> float:
        child = run_child(code, str(stand.folder), str(length), env={"XDG_CACHE_HOME": str(stand.scratch / cache)})
        if child.status:
            raise RuntimeError(f"the timed process ended with status {child.status}: {child.stderr[-300:]}")
        return child.wall_s

    def cold(number: int) -> float:
        seconds = start(f"cold{number}")
        shutil.rmtree(stand.scratch / f"cold{number}")
        return seconds

    taken = stand.interleave({"cold": cold, "warm": lambda number: start("warm")})
    for name, words in (("cold", "empty compilation cache"), ("warm", "filled compilation cache")):
        yield stand.record(
            What(
                op="start",
                kernel=words,
                workload="start_up",
                dtype="float32",
                config={"tokens": length, **_shape(config)},
                title=f"process start to end of a one-token answer, {length:,} tokens, {_words(config)}",
            ),
            taken[name],
            How(warmup=1, iterations=len(taken[name]), interleaved=True, cold_cache=words),
            comparison=versus("empty compilation cache", taken["cold"], taken["warm"], None)
            if name == "warm"
            else None,
        )


def _shape(config: ModelConfig) -> dict[str, int]:
    names = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size")
    return {name: getattr(config, name) for name in names}


def _words(config: ModelConfig) -> str:
    heads = f"{config.num_heads}/{config.num_kv_heads} heads of {config.head_dim}"
    return f"{config.num_layers} layers, D {config.hidden_size}, {heads}"
