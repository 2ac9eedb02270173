"""Check every kernel against the oracle on this device: the catalogue, random shapes, adversarial numbers.

Errors are in units of the tolerance that `oracle.tolerance` derives from the call, so an error above 1 fails. Quantiles
over all elements tell a bad kernel (half the tolerance everywhere) from an unlucky rounding of one element.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from types import MappingProxyType
from typing import Final, NamedTuple

import jax
import numpy as np

from tessera.attention import oracle
from tessera.attention.contract import AttentionOut, AttentionSpec
from tessera.attention.kernel import Kernel
from tessera.attention.workloads import Workload
from tessera.core import hardware, interrupt
from tessera.measure import evidence, trials
from tessera.measure.errors import plain

QUANTILES: Final = (0.5, 0.9, 0.99, 1.0)


def huge(call: oracle.Call) -> oracle.Call:
    """Scale q by 2048. Logits pass 1e4, so a row gives all weight to one key, or rounding decides between two."""
    return call._replace(q=call.q * call.q.dtype.type(2048))


def equal(call: oracle.Call) -> oracle.Call:
    """Set all keys to 1, so that all scores of a row tie for the maximum."""
    return call._replace(k=np.where(np.isnan(call.k), np.nan, 1.0).astype(call.k.dtype))


def one_key(call: oracle.Call) -> oracle.Call:
    """Keep the first key of each sequence and turn all others into padding."""
    k, v = (np.where(np.isnan(x), 0.5, x).astype(x.dtype) for x in (call.k, call.v))
    k[:, 1:] = v[:, 1:] = np.nan
    return call._replace(k=k, v=v, kv_len=np.ones_like(call.kv_len), q_start=call.q_start * 0)


def no_key(call: oracle.Call) -> oracle.Call:
    """Turn every key into padding, so that each row's output is 0 and its lse -inf."""
    return call._replace(
        k=np.full_like(call.k, np.nan), v=np.full_like(call.v, np.nan), kv_len=np.zeros_like(call.kv_len)
    )


NUMBERS: Final[Mapping[str, Callable[[oracle.Call], oracle.Call]]] = MappingProxyType(
    {"normal": lambda call: call, "huge": huge, "equal": equal, "one_key": one_key, "no_key": no_key}
)
"""Name -> function that changes a call's numbers."""
CONFIGS: Final = ("small", "default", "all")
"""Block sizes to check: the smallest, with which every loop runs several times; production's default; or all."""
HEAD_DIMS: Final = (64, 128, 256)
GROUPS: Final = (2, 1, 4)
"""Query heads per KV head in a long sparse prefill. With query tiles of 64, one list of key tiles then serves 128, 64
or 256 rows, and a kernel splits each of these numbers differently."""
_HEADS = {"num_kv_heads": 1, "head_dim": 64, "spec": AttentionSpec(tile=64, query_tile=64), "fraction": 0.75}
LONG: Final[Mapping[str, Workload]] = MappingProxyType(
    {
        "prefill": Workload(
            name="100 x 1100", num_queries=100, num_keys=1100, num_heads=2, q_start=(990,), kv_len=(1090,),
            tags=("prefill",), **_HEADS,
        ),
        "decode": Workload(
            name="1 x 1100", batch=2, num_queries=1, num_keys=1100, num_heads=4, q_start=(1089, 129),
            kv_len=(1090, 130), tags=("decode",), **_HEADS,
        ),
    }
)  # fmt: skip
"""Phase -> long call. Even at the largest block size, the call has more key blocks than the deepest pipeline holds. The
keys end in NaN padding, and a prefill's rows need two matrix products."""


class Trial(NamedTuple):
    """One call of one kernel."""

    kernel: Kernel
    workload: Workload
    dtype: str
    numbers: str
    seed: int
    config: object = None
    """Block sizes; if None, the kernel's smallest."""

    def words(self) -> str:
        """Describe the trial for a person, with the seed that repeats it."""
        blocks = "" if self.config is None else f", {self.config}"
        call = f"{self.dtype}, {self.workload.name}, {self.numbers} numbers"
        return f"{self.kernel.name}, {call}{blocks}, --seed {self.seed}"


class Outcome(NamedTuple):
    """Result of one trial: `errors` holds error / tolerance of each compared element, `wrong` all other faults."""

    trial: Trial
    errors: np.ndarray
    wrong: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.wrong and not (self.errors > 1).any()


def trials_of(kernel: Kernel, random_shapes: int, seed: int) -> Iterator[Trial]:
    """Yield the kernel's trials in every dtype that it takes: the catalogue, random shapes, adversarial numbers."""
    rng = np.random.default_rng(seed)
    drawn = [random_workload(rng, kernel.phase, number) for number in range(random_shapes)]
    fitting = (*trials.catalogue(kernel), *drawn)
    for dtype in kernel.dtypes:
        usable = [w for w in (trials.taken(kernel, w, dtype) for w in fitting) if w is not None]
        for workload in usable:
            yield Trial(kernel, workload, dtype, "normal", seed)
        for numbers in tuple(NUMBERS)[1:]:
            yield Trial(kernel, next(w for w in usable if w.batch > 1), dtype, numbers, seed)


def config_trials(kernel: Kernel, every: bool, seed: int) -> Iterator[Trial]:
    """Yield trials at every head dim with production's default blocks or, with `every`, all blocks of the search space,
    on calls with more key blocks than any pipeline holds."""
    heads = GROUPS if kernel.role == "sparse" and kernel.phase == "prefill" else GROUPS[:1]
    for head_dim, group in product(HEAD_DIMS, heads):
        w = replace(LONG[kernel.phase], head_dim=head_dim)
        if kernel.phase == "prefill":
            w = replace(w, num_heads=group)
        w = replace(w, name=f"{w.name}, {w.num_heads} heads of {head_dim}")
        w = trials.taken(kernel, w, kernel.dtypes[0])
        if w is None or w.head_dim != head_dim or (w.spec.tile == 1 and group != GROUPS[0] and not every):
            continue
        asked = w.role_spec(kernel.role), w.shapes(kernel.role, kernel.dtypes[0])
        for config in kernel.search_space(*asked) if every else [kernel.default_config(*asked)]:
            yield Trial(kernel, w, kernel.dtypes[0], "normal", seed, config)


def random_workload(rng: np.random.Generator, phase: str, number: int) -> Workload:
    """Draw a small random call whose sequences differ in `q_start`, `kv_len` and `q_len`."""
    batch, groups, kv_heads = (int(rng.integers(1, n)) for n in (4, 9, 4))
    queries = 1 if phase == "decode" else int(rng.integers(1, 100))
    keys = int(rng.integers(1, 400))
    causal = bool(rng.random() < 0.8)
    spec = AttentionSpec(
        causal=causal,
        window=int(rng.integers(1, keys + 1)) if causal and rng.random() < 0.3 else None,
        softcap=float(rng.choice([2.0, 30.0])) if rng.random() < 0.3 else None,
        scale=0.2 if rng.random() < 0.2 else None,
        tile=int(rng.choice([1, 16, 32, 64, 128])),
        query_tile=int(rng.choice([8, 16, 20, 32, 64])),
    )
    return Workload(
        name=f"random {number}: {queries} x {keys}, heads {groups * kv_heads} of {kv_heads}",
        batch=batch,
        num_queries=queries,
        num_keys=keys,
        num_heads=groups * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=int(rng.choice([16, 64, 128])),
        spec=spec,
        fraction=float(rng.uniform(0.1, 1)),
        q_start=tuple(int(x) for x in rng.integers(-5, keys, batch)),
        kv_len=tuple(int(x) for x in rng.integers(0, keys + 1, batch)),
        q_len=tuple(int(x) for x in rng.integers(0, queries + 1, batch)),
        tags=("test", phase),
    )


def attempt(trial: Trial) -> Outcome:
    """Run a trial and compare its result with the oracle's; an error or a race becomes a failed outcome."""
    kernel = trial.kernel
    call = NUMBERS[trial.numbers](trials.make(trial.workload, kernel.role, trial.dtype, trial.seed))
    try:
        result = trials.run(kernel, call, trial.dtype, trial.config)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return Outcome(trial, np.zeros(0), (plain(error),))
    truth = oracle.attend(call)
    allowed = oracle.tolerance(call, truth, trial.dtype, **trials.roundings(kernel))
    return Outcome(trial, *compare(result, truth, allowed, kernel.role))


def compare(
    result: AttentionOut, truth: oracle.Answer, allowed: oracle.Answer, role: str
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return (error / tolerance of each element of out, lse and mass; other breaches of the contract). Elements that
    are zero on both sides (padding, invisible tiles) are skipped: they would lower the quantiles."""
    empty = np.isneginf(truth.lse)
    wrong = []
    if not np.array_equal(np.isneginf(result.lse), empty):
        wrong.append("rows that see no key must give lse -inf, and no other rows may")
    if np.any(result.out[empty] != 0):
        wrong.append("rows that see no key must give out 0")
    if (result.mass is not None) != (role == "score"):
        wrong.append('a call with role "score" must return mass, and a call with any other role must not')
    parts = [(result.out, truth.out, allowed.out), (result.lse[~empty], truth.lse[~empty], allowed.lse)]
    if role == "score" and result.mass is not None:
        parts.append((result.mass, truth.mass, allowed.mass))
    with np.errstate(invalid="ignore", divide="ignore"):  # a tolerance of 0 allows no error
        errors = np.concatenate([(np.abs(x - y) / limit)[(x != 0) | (y != 0)] for x, y, limit in parts])
    if np.isnan(errors).any():
        wrong.append("NaN or infinity reached the result")
    return np.nan_to_num(errors, nan=np.inf, posinf=np.inf), tuple(wrong)


def summary(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return quantiles of the error over all elements of all outcomes, in units of the tolerance."""
    errors = np.concatenate([o.errors for o in outcomes])
    if not errors.size:
        return {}
    values = np.quantile(errors, QUANTILES, method="higher")
    return {f"p{100 * q:g}" if q < 1 else "max": float(x) for q, x in zip(QUANTILES, values)}


def record(outcomes: Sequence[Outcome], command: str) -> evidence.Record:
    """Build one kernel's record for one dtype: the samples are the trials' worst errors, the facts the quantiles."""
    first = outcomes[0].trial
    failed = [o for o in outcomes if not o.passed]
    worst = [float(o.errors.max(initial=0)) for o in outcomes]
    workload = "oracle trials" if first.config is None else "oracle trials of production's blocks"
    return evidence.make(
        evidence.What(op="verify", kernel=first.kernel.name, workload=workload, dtype=first.dtype),
        [x for x in worst if np.isfinite(x)],
        command=command,
        unit="of tolerance",
        how=evidence.How(iterations=len(outcomes), check="float64 oracle, derived tolerance"),
        facts={
            "trials": len(outcomes),
            "elements": int(sum(o.errors.size for o in outcomes)),
            "distribution": {k: v for k, v in summary(outcomes).items() if np.isfinite(v)},
            "simulated": trials.is_simulated(first.kernel),
            "seed": first.seed,
        },
        error="; ".join(f"{o.trial.words()}: {reason(o)}" for o in failed) or None,
    )


def reason(outcome: Outcome) -> str:
    said = list(outcome.wrong)
    if (outcome.errors > 1).any():
        share = float((outcome.errors > 1).mean())
        said.append(f"{share:.2%} of elements past the tolerance; worst error {outcome.errors.max():.3g} x tolerance")
    return ", ".join(said)


def run(
    *,
    kernel: str = "",
    simulate: bool = False,
    configs: str = "small",
    random_shapes: int = 5,
    seed: int | None = None,
    out: str | None = None,
) -> int:
    """Verify kernels, print a table, append records; return 1 if a trial failed.

    Args:
        kernel: part of a name; only kernels whose name contains it run.
        simulate: whether kernels of absent chips also run, in a simulator (minutes each).
        configs: "small": the smallest blocks over the catalogue, random shapes and adversarial numbers; "default" or
            "all": production's default blocks, or the whole search space, on a long call of every head dim.
        random_shapes: random calls per kernel and dtype, with the smallest blocks.
        seed: seed of numbers and shapes; if None, a fresh one, which is printed.
        out: file of records; none are kept if None.
    """
    from rich.console import Console
    from rich.progress import Progress

    if simulate:
        hardware.prepare_simulator()
    chosen = [k for k in trials.kernels(simulate=simulate) if kernel in k.name]
    if not chosen:
        names = ", ".join(k.name for k in trials.kernels())
        raise ValueError(f"--kernel {kernel!r} must be part of one of {names}; --simulate adds kernels of absent chips")
    if configs not in CONFIGS:
        raise ValueError(f"--configs {configs!r} must be one of {', '.join(CONFIGS)}")
    seed = int(np.random.SeedSequence().entropy % 2**31) if seed is None else seed
    which = f"--random {random_shapes}" if configs == "small" else f"--configs {configs}"
    command = f"tessera verify --seed {seed} {which}{' --simulate' if simulate else ''}"
    console, failed, lines = Console(), 0, []
    console.width = max(console.width, 110)  # a pipe defaults to 80 columns
    if configs == "small":
        plan = [list(trials_of(k, random_shapes, seed)) for k in chosen]
    else:
        plan = [list(config_trials(k, configs == "all", seed)) for k in chosen]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=sum(map(len, plan)))
        for todo in plan:
            outcomes = []
            for trial in todo:
                interrupt.check()
                progress.update(bar, description=f"{trial.kernel.name} {trial.workload.name}"[:60])
                outcomes.append(attempt(trial))
                progress.advance(bar)
                if trial.config is not None:  # no two of these trials share a program, and hundreds would fill memory
                    trials.compiled.cache_clear()
                    jax.clear_caches()
            for dtype in dict.fromkeys(o.trial.dtype for o in outcomes):
                own = [o for o in outcomes if o.trial.dtype == dtype]
                lines.append(own)
                failed += sum(not o.passed for o in own)
                if out is not None:
                    evidence.append(out, record(own, f"{command} --kernel {own[0].trial.kernel.name}"))
    print_table(console, lines, seed)
    return int(failed > 0)


def print_table(console, lines: Sequence[Sequence[Outcome]], seed: int) -> None:
    """Print a line per kernel and dtype, then every failure."""
    from rich.table import Table

    table = Table(title=f"errors in units of the tolerance (at most 1), seed {seed}", title_justify="left")
    for name in ("kernel", "dtype", "trials", "elements", "median", "90 %", "99 %", "worst", ""):
        table.add_column(name, justify="left" if name in ("kernel", "dtype", "") else "right", no_wrap=True)
    for outcomes in lines:
        first, found = outcomes[0].trial, summary(outcomes)
        good = all(o.passed for o in outcomes)
        name = f"{first.kernel.name} (simulated)" if trials.is_simulated(first.kernel) else first.kernel.name
        figures = [f"{found.get(q, float('nan')):.2g}" for q in ("p50", "p90", "p99", "max")]
        elements = sum(o.errors.size for o in outcomes)
        table.add_row(name, first.dtype, str(len(outcomes)), f"{elements:,}", *figures, "ok" if good else "FAILED")
    console.print(table)
    for outcome in (o for outcomes in lines for o in outcomes if not o.passed):
        console.print(f"{outcome.trial.words()}: {reason(outcome)}", style="red", markup=False, highlight=False)
