"""Shared set-up of the benchmark cases: sizes, the PyTorch worker, this device's peak rates, a model on disk."""

import functools
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lab.peers.process import Peer
from tessera.core import hardware
from tessera.measure import evidence, timing
from tessera.measure.errors import without_names
from tessera.measure.evidence import INTERVAL_ROUNDS, How, Record, What
from tessera.models.config import ModelConfig
from tessera.models.files.checkpoint import save_folder
from tessera.models.weights import init_params

REST_S = 0.2
"""Seconds to pause before each sample: PyTorch's and XLA's idle threads spin for a while after a call."""

CREDIBLE = 0.8
"""Shortest credible sample, as a fraction of the roofline's time. It is less than 1, since the peak rates are measured
and may be a few percent off."""

WORKER = Path(__file__).parents[1] / "peers" / "worker.py"
"""Script that runs PyTorch and transformers. A checkout has it; an installed package does not."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the cases, except for the fixed head counts of the attention cases.

    Attributes:
        attention_tokens: length of the dense prefill that is compared with PyTorch.
        sparse_tokens: length of the sparse and score calls that are compared with our dense call.
        long_tokens: prompt length of the whole-model prefill, Kascade against our dense attention.
        short_tokens: prompt length of the whole-model prefill and decode that are compared with transformers.
        decode_steps: tokens decoded per sample.
        memory_tokens: prompt lengths at which memory is measured.
        crossover_tokens: prompt lengths at which the demo model's prefill is timed, ascending.
        start_tokens: prompt length of the start-up case, and rows of the compilation case's chunk.
        config: the model's configuration; its weights are random.
        rounds: samples per side if time allows.
        least_rounds: minimum samples per side. The longest prompts need only one, since a round may take two minutes.
        suite_s: seconds after which only `least_rounds` run. On a slow machine, those rounds take three minutes more.
        passkey_tokens: prompt lengths of the shipped model's pass-key tasks.
        passkeys: pass-key tasks per length.
    """

    attention_tokens: int = 8192
    sparse_tokens: int = 16384
    long_tokens: int = 16384
    short_tokens: int = 4096
    decode_steps: int = 32
    memory_tokens: tuple[int, ...] = (4096, 8192, 16384, 32768)
    crossover_tokens: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    start_tokens: int = 1024
    config: ModelConfig = ModelConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_layers=12,
        num_heads=12,
        num_kv_heads=4,
        head_dim=64,
        max_positions=65536,
    )
    rounds: int = INTERVAL_ROUNDS
    least_rounds: int = 3
    suite_s: float = 690.0
    passkey_tokens: tuple[int, ...] = (2048, 4096)
    passkeys: int = 100


SMOKE = Sizes(
    attention_tokens=256,
    sparse_tokens=1024,
    long_tokens=512,
    short_tokens=256,
    decode_steps=4,
    memory_tokens=(256, 512, 1024),
    crossover_tokens=(256, 512),
    start_tokens=128,
    config=replace(
        Sizes().config, vocab_size=256, hidden_size=64, intermediate_size=128, num_layers=6, num_heads=4, num_kv_heads=2
    ),
    rounds=2,
    passkey_tokens=(512,),
    passkeys=2,
)


class Stand:
    """State shared by all cases. Expensive parts are built on first use; close() ends the worker and removes the model.

    Attributes:
        suite, sizes: name of the running suite, and its sizes.
        peer_python: interpreter of the peers' environment.
        case: name of the running case.
        ends: deadline of the running case's rounds, on the clock of `time.monotonic`.
    """

    def __init__(self, suite: str, sizes: Sizes, peer_python: str | os.PathLike):
        self.suite, self.sizes, self.peer_python = suite, sizes, peer_python
        self.case, self.ends = "", math.inf
        self._peer: Peer | None = None
        self._scratch = tempfile.TemporaryDirectory(prefix="tessera-bench-")

    def close(self) -> None:
        """End the worker and remove everything written for the run."""
        if self._peer is not None:
            self._peer.close()
            self._peer = None
        self._scratch.cleanup()

    @property
    def scratch(self) -> Path:
        """Folder for this run's files."""
        return Path(self._scratch.name)

    @property
    def peer_refusal(self) -> str:
        """Reason why Tessera cannot be compared with PyTorch and transformers here; "" if it can."""
        if jax.default_backend() != "cpu":
            return f"the PyTorch worker computes on the CPU, Tessera on a {jax.default_backend().upper()}"
        for path in (self.peer_python, WORKER):
            if not Path(path).exists():
                return without_names(f"{path} does not exist: in a checkout, `make peers` builds .venv-peers")
        return ""

    @property
    def peer(self) -> Peer:
        """The PyTorch and transformers worker, started on first use with one thread per core."""
        if self._peer is None:
            self._peer = Peer(self.peer_python, WORKER, str(hardware.cpu().cores))
            self.peer_versions = self._peer.ask("hello")
        return self._peer

    @functools.cached_property
    def ceilings(self) -> timing.Ceilings:
        """Peak rates of this device, measured once per run."""
        return timing.ceilings()

    @functools.cached_property
    def folder(self) -> Path:
        """Hugging Face folder with the random-weight model, which Tessera and the worker load."""
        return self.write_model(self.sizes.config, "model")

    def write_model(self, config: ModelConfig, name: str) -> Path:
        """Save a model with random weights in folder `name` of the scratch folder; return the folder's path."""
        params = init_params(config, jax.random.key(0), jnp.float32)
        folder = self.scratch / name
        save_folder(folder, params, config)
        return folder

    def interleave(
        self, contenders: Mapping[str, Callable[[int], float]], *, least: int | None = None, **options: Any
    ) -> dict[str, list[float]]:
        """Call `timing.interleave` with `sizes.rounds` rounds, or as many as end before `ends`.

        At least `least` rounds run even so; None means `sizes.least_rounds`.
        """
        least = self.sizes.least_rounds if least is None else least
        return timing.interleave(contenders, rounds=self.sizes.rounds, until=self.ends, least=least, **options)

    def record(self, what: What, samples: Sequence[float], how: How, **fields: Any) -> Record:
        """Build one side's record, with an error if a sample is shorter than the roofline allows (work was skipped)."""
        made = evidence.make(what, samples, how=how, command=self.command(), **fields)
        if made.unit == "s" and made.flops and what.dtype:
            floor_s = self._floor_s(what.dtype, made.flops, made.bytes or 0.0)
            fastest = min(made.samples)
            if fastest < CREDIBLE * floor_s:
                said = f"{fastest:.3g} s of one sample is below the roofline floor {floor_s:.3g} s: work was skipped"
                return replace(made, error=said, comparison=None)
            made = replace(made, peak_fraction=floor_s / made.median)
            if what.op == "model":
                chip = hardware.chip(made.where.device)
                used = utilisation(made.flops, made.bytes, made.median, what.dtype, self.ceilings, chip)
                made = replace(made, facts={**made.facts, **used})
        return made

    def _floor_s(self, dtype: str, flops: float, num_bytes: float) -> float:
        """Return the shortest time, in seconds, that the roofline allows.

        A kernel may convert bfloat16 to another dtype, so a bfloat16 call is held to the fastest dtype's rate.
        """
        names = {dtype, *self.ceilings.flops_per_s} if dtype == "bfloat16" else {dtype}
        return min(self.ceilings.floor_s(name, flops, num_bytes) for name in names)

    def command(self) -> str:
        """Return the command line that repeats the running case."""
        return f"python -m lab bench --suite {self.suite} --only {self.case}"


def draw(seed: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    """Draw standard normal float32 numbers; the peer's worker draws the same ones from the same seed."""
    return np.random.default_rng(seed).standard_normal(tuple(shape), dtype=np.float32)


def compile_step(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[float, jax.stages.Compiled]:
    """Trace and compile a function for arguments like the given ones; return the seconds taken and the program."""
    anew = jax.jit(lambda *given: function(*given))  # a new function, since JAX would reuse an earlier trace
    return timing.time_call(lambda: anew.lower(*arguments).compile())


def utilisation(
    flops: float,
    num_bytes: float,
    seconds: float,
    dtype: str,
    ceilings: timing.Ceilings,
    chip: hardware.Chip | None = None,
) -> dict[str, float]:
    """Compute the share of the machine's peak rates that a model's call used, as facts of the call's record.

        mfu              = flops / (seconds x measured flops per second of this dtype)
        bandwidth_share  = bytes / (seconds x measured bytes per second)

    Flops and bytes come from `model_work`: what the call needs, without keys that a sparse policy skips. Recomputation,
    masked blocks and padding therefore do not count as use. The same process measured the peak rates. For a known chip,
    "bandwidth_share_nominal" and, in bfloat16, "mfu_nominal" divide by the data sheet's peaks per device instead.
    """
    measured_flops_per_s, measured_bytes_per_s = ceilings.flops_per_s[dtype], ceilings.bytes_per_s
    facts = {
        "mfu": flops / (seconds * measured_flops_per_s),
        "bandwidth_share": num_bytes / (seconds * measured_bytes_per_s),
        "ceiling_flops_per_s": measured_flops_per_s,
        "ceiling_bytes_per_s": measured_bytes_per_s,
    }
    if chip is not None:
        facts["bandwidth_share_nominal"] = num_bytes / (seconds * chip.bytes_per_s / chip.devices)
        if dtype == "bfloat16":
            facts["mfu_nominal"] = flops / (seconds * chip.bf16_flops_per_s / chip.devices)
    return facts


@contextmanager
def compiled_anew() -> Iterator[None]:
    """Disable the persistent compilation cache during a measurement."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
