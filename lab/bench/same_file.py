"""Time SmolLM2's GGUF file on a CPU: Tessera, dense and under the model's plan, against llama.cpp and transformers.

All sides take turns to continue the same random tokens, on as many threads as this machine has cores. llama.cpp reads
the GGUF file; transformers reads a folder with the file's weights converted to float32. Targets are ratios of
llama.cpp's time to ours.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from lab.bench.child import run_child
from lab.bench.stand import REST_S, WORKER, Stand
from lab.peers.process import Peer
from tessera import generate
from tessera.core import hardware
from tessera.measure.evidence import How, Record, What
from tessera.measure.model_work import draw_tokens, fresh_seed, model_work, versus
from tessera.models.files.fetch import fetch
from tessera.runtime.sampling import GREEDY
from tessera.sparse.baselines import Dense
from tessera.sparse.plan import THROUGHOUT

LLAMA_CPP, TRANSFORMERS = "llama.cpp", "transformers"
SCRIPT = WORKER.with_name("llama_cpp.py")
STEPS = 32
"""Tokens decoded per sample."""
LONGEST = 8192 - 64
"""Longest prompt in tokens. In llama.cpp, prompt and answer must fit into the model's context of 8,192 tokens."""
START_TOKENS = 32
PREFILL_TARGETS = {("dense", LONGEST): 2.0, ("kascade", LONGEST): 3.0}
DECODE_TARGETS = {1024: 0.7, LONGEST: 1.0}
START_TARGET = 0.5
"""Target for llama.cpp's start-up time / ours. PREFILL_TARGETS and DECODE_TARGETS hold the same kind of target."""
OURS: Mapping[str, Mapping[str, str | None]] = {"float32": {"dtype": "float32"}, "bfloat16": {"dtype": "bfloat16"},
                                                "int8": {"weights": "int8"}}  # fmt: skip
"""Number formats in which Tessera's weights are timed, each with the arguments of `load` that select it."""


def lengths(stand: Stand, *, length: int) -> Iterator[Record]:
    """Measure the prefill of `length` tokens and the decoding of STEPS tokens after it, on every side.

    Raises:
        ValueError: a peer is not available.
    """
    if reason := stand.peer_refusal:
        raise ValueError(f"cannot compare with llama.cpp and transformers: {reason}")
    path, threads = fetch("smollm2"), hardware.cpu().cores
    llama = Peer(stand.peer_python, SCRIPT)
    try:
        yield from _lengths(stand, llama, str(path), threads, length)
    finally:
        llama.close()


def _lengths(stand: Stand, llama: Peer, path: str, threads: int, length: int) -> Iterator[Record]:
    versions = {**llama.ask("hello"), "threads": threads}
    llama.ask("load", path=path, context=length + STEPS + 8, threads=threads)
    models = {}
    for form, options in OURS.items():
        model = generate.load(path, attention="kascade", **options)
        models[f"dense {form}"] = replace(model, policy=Dense())
        models[f"kascade {form}"] = replace(model, policy=replace(model.policy, **THROUGHOUT))
    config = replace(models["dense float32"].config, max_positions=length + STEPS + 1)
    models = {name: replace(model, config=config) for name, model in models.items()}
    folder = stand.scratch / "smollm2"
    if not folder.exists():
        generate.save(generate.load(path, dtype="float32"), folder)
    stand.peer.ask("load", folder=str(folder), dtype="float32")
    taken = {name: {"prefill": [], "decode": []} for name in (*models, LLAMA_CPP, TRANSFORMERS)}
    firsts: dict[tuple[str, int], int] = {}

    def note(name: str, number: int, prefill_s: float, decode_s: float, first: int) -> float:
        firsts[name, number] = first
        if number >= 0:
            taken[name]["prefill"].append(prefill_s)
            taken[name]["decode"].append(decode_s / STEPS)
        return prefill_s + decode_s

    def ours(name: str, number: int) -> float:
        prompt = draw_tokens(config, fresh_seed(number), length)
        [answer] = models[name].generate([prompt], max_new_tokens=STEPS + 1, **GREEDY)
        if len(answer.tokens) <= STEPS:
            raise ValueError(f"{name} ended after {len(answer.tokens)} of {STEPS + 1} tokens: draw other tokens")
        return note(name, number, answer.ttft_s, STEPS / answer.decode_tokens_per_s, answer.tokens[0])

    def llama_cpp(number: int) -> float:
        prompt = draw_tokens(config, fresh_seed(number), length)
        said = llama.ask("generate", tokens=prompt, steps=STEPS)
        return note(LLAMA_CPP, number, said["prefill_s"], said["decode_s"], said["token"])

    def transformers(number: int) -> float:
        prompt = draw_tokens(config, fresh_seed(number), length)
        first, rest = stand.peer.ask("prefill", tokens=prompt), stand.peer.ask("decode", steps=STEPS)
        return note(TRANSFORMERS, number, first["seconds"], rest["seconds"], first["token"])

    contenders = {name: partial(ours, name) for name in models} | {LLAMA_CPP: llama_cpp, TRANSFORMERS: transformers}
    rounds = len(stand.interleave(contenders, rest_s=REST_S)[LLAMA_CPP])
    for phase in ("prefill", "decode"):
        for name in taken:
            same = float(np.mean([firsts[name, n] == firsts["dense float32", n] for n in range(rounds)]))
            yield _record(stand, config, name, phase, length, taken, {"same_first_token": same, **versions})


def _record(stand: Stand, config, name: str, phase: str, length: int, taken, facts) -> Record:
    peer = name in (LLAMA_CPP, TRANSFORMERS)
    policy = name.partition(" ")[0]
    target = PREFILL_TARGETS.get((policy, length)) if phase == "prefill" else DECODE_TARGETS.get(length)
    work = model_work(config, length) if phase == "prefill" else model_work(config, 1, past=length)
    counted = phase == "prefill" and name == "dense float32"  # other forms need fewer flops or bytes than this
    return stand.record(
        What(
            op="model",
            kernel=name,
            workload=f"same_file_{phase}_{length}",
            dtype="float32" if peer else name.partition(" ")[2],
            config={"tokens": length, "decode_steps": STEPS, "model": "SmolLM2-135M-Instruct.Q4_1"},
            title=f"SmolLM2-135M, {'prefill' if phase == 'prefill' else 'a decoded token after'} {length:,} tokens",
        ),
        taken[name][phase],
        How(warmup=1, iterations=len(taken[name][phase]), interleaved=True, check="tokens counted; first compared"),
        work=work if counted else None,
        comparison=None if peer else versus(LLAMA_CPP, taken[LLAMA_CPP][phase], taken[name][phase], target),
        facts=facts,
    )


def start(stand: Stand) -> Iterator[Record]:
    """Measure the time and the peak memory of a process that generates one token; each sample is a new process.

    Our timed processes find their compiled programs on disk. The warm-up process compiles them.
    """
    if reason := stand.peer_refusal:
        raise ValueError(f"cannot compare with llama.cpp: {reason}")
    path, threads = fetch("smollm2"), hardware.cpu().cores
    code = "import sys; from lab.bench import model; model.answer_once(sys.argv[1], int(sys.argv[2]))"
    tokens = [str(token) for token in range(1000, 1000 + START_TOKENS)]
    weighed: dict[str, list[float]] = {"dense": [], LLAMA_CPP: []}

    def ours(number: int) -> float:
        child = run_child(
            code, str(path), str(START_TOKENS),
            env={"XDG_CACHE_HOME": str(stand.scratch / "start")},
        )  # fmt: skip
        if child.status or child.peak_bytes is None:
            raise RuntimeError(f"the timed process ended with status {child.status}: {child.stderr[-300:]}")
        weighed["dense"] += [float(child.peak_bytes)] if number >= 0 else []
        return child.wall_s

    def llama_cpp(number: int) -> float:
        begin = time.perf_counter()
        command = [str(stand.peer_python), str(SCRIPT), "once", str(path), str(threads), *tokens]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        seconds = time.perf_counter() - begin
        if done.returncode:
            raise RuntimeError(f"llama.cpp ended with status {done.returncode}: {done.stderr[-300:]}")
        weighed[LLAMA_CPP] += [float(done.stdout.split()[-1])] if number >= 0 else []
        return seconds

    taken = stand.interleave({"dense": ours, LLAMA_CPP: llama_cpp})
    shape = {"tokens": START_TOKENS, "model": "SmolLM2-135M-Instruct.Q4_1"}
    for name in taken:
        for op, unit, samples, target in (("start", "s", taken, START_TARGET), ("memory", "bytes", weighed, None)):
            said = "seconds" if op == "start" else "peak memory"
            yield stand.record(
                What(
                    op=op,
                    kernel=name,
                    workload=f"same_file_{op}",
                    config=shape,
                    title=f"SmolLM2-135M, a one-token answer from a fresh process: {said}",
                ),
                samples[name],
                How(warmup=1, iterations=len(samples[name]), interleaved=True, cold_cache="programs on disk"),
                unit=unit,
                comparison=versus(LLAMA_CPP, samples[LLAMA_CPP], samples[name], target) if name == "dense" else None,
                facts={"median": statistics.median(samples[name]), "python": sys.version.split()[0]},
            )
