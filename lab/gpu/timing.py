"""Time our GPU kernels and the peers in turns on the same numbers, and derive Kascade's time at 131,072 tokens."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax

from lab.gpu import calls, check, clock, peers
from lab.gpu.calls import LLAMA_8B, LLAMA_70B, Setting
from lab.gpu.session import Session, on_gpu, until_late
from tessera.attention import work
from tessera.attention.contract import AttentionOut, AttentionSpec, KeyValues, Positions, Selection
from tessera.attention.kernel import Kernel
from tessera.measure import timing, trials
from tessera.measure.evidence import Comparison, How, What

SEED_SHAPE = Setting(1, 512, 512, 8, 8, 64, causal=False)
LONG = 131072
PREFILL = tuple(Setting(1, n, n, *LLAMA_8B) for n in (16384, LONG, 8192, 32768, 2048, 512, 4096, 1024, 65536))
PREFILL_70B = tuple(Setting(1, n, n, *LLAMA_70B) for n in (16384, 4096))
DECODE = tuple(
    Setting(batch, 1, n, *heads)
    for heads in (LLAMA_8B, LLAMA_70B)
    for n in (LONG, 32768, 8192)
    for batch in (1, 16, 4, 64)
)
SETTINGS = (SEED_SHAPE, *PREFILL[:2], *DECODE[:3], *PREFILL[2:], *PREFILL_70B, *DECODE[3:])
"""Calls to time, the most important first, because the time may run out."""
FIRST = 4
"""Number of SETTINGS that the first pass (`session.first`) times: SEED_SHAPE, two prefills and one decode."""
DRY = (Setting(1, 64, 64, 2, 1, 64), Setting(1, 1, 128, 2, 1, 64))
MOST_OF_JAX = 0.8
"""Share of jax's memory limit that a call's arrays may take. A larger call is not timed, and its record says so."""

SAMPLE_S, COMPILE_S = 60.0, 240.0
"""Time limits in seconds: for one sample, and for compiling all contenders of a call."""
LAYERS, ANCHORS = 32, 5
ROLES = ("score", "sparse")
TARGETS = {"dense prefill": 0.95, "seed": 1.0, "kascade prefill": 3.4, "kascade decode": 5.0}


class Numbers(NamedTuple):
    """A call's arrays, shared by all contenders.

    `inputs` holds q [B,T,N,H], k and v [B,S,K,H]; `kv` holds the same k and v in the cache's layout.
    """

    setting: Setting
    key: jax.Array
    inputs: tuple[jax.Array, jax.Array, jax.Array]
    kv: KeyValues
    positions: Positions

    @classmethod
    def fresh(cls, setting: Setting) -> "Numbers":
        """Draw the call's numbers from a fresh key."""
        _, key = calls.fresh_key()
        q, k, v = setting.inputs(key)
        return jax.block_until_ready(cls(setting, key, (q, k, v), KeyValues.of(k, v), setting.positions()))


class Contender(NamedTuple):
    """A compiled call that waits for its result, and the spec and the selection with which to check the result."""

    call: Callable[[], Any]
    spec: AttentionSpec
    selection: Selection | None = None


def run(session: Session) -> None:
    """Append a record per contender and call; if `session.first`, only for the first FIRST calls."""
    missing = [name for name in peers.PEERS if not peers.installed(name)]
    for name in missing:
        what = What(op="gpu attention", kernel=name, workload="any")
        if not session.retry and not session.is_done(what):
            session.add(what, (), error="not installed" if on_gpu() else "not installed, or no GPU for it")
    watch = clock.Clock(session)
    settings = DRY if session.dry else SETTINGS[: FIRST if session.first else None]
    for setting in until_late(session, settings, 0 if session.dry else 45):
        time_setting(session, watch, setting)


def time_setting(session: Session, watch: clock.Clock, setting: Setting) -> None:
    """Time a call's contenders that are not done. If one of our kernels is among them, also time the finished
    contenders again, so that all are compared in the same rounds."""
    kernels = {k.name: k for k in calls.kernels_here(session, setting.phase) if calls.taken(k, setting)}
    others = [name for name in peers.PEERS if peers.installed(name)]
    whats = {name: what_of(name, setting) for name in (*kernels, *others)}
    todo = {name for name in whats if not session.is_done(whats[name])}
    if todo & set(kernels):
        todo |= {name for name in whats if session.is_good(whats[name])}
    compiling = What(op="gpu compile", kernel="", workload=setting.words(), dtype=setting.dtype)
    if not todo or not session.retry and session.is_done(compiling):
        return
    if setting.bytes > most_bytes():
        said = f"q, out, and K and V in two layouts take {setting.bytes / 1e9:.1f} GB"
        for name in () if session.retry else todo:
            session.add(whats[name], (), error=f"left out: {said}, more than the limit of {most_bytes() / 1e9:.1f} GB")
        return
    numbers = drawn(session, setting, "gpu attention")
    if numbers is None:
        return
    makers: dict[str, Callable[[], Contender]] = {n: partial(ours, k, numbers) for n, k in kernels.items()}
    makers |= {name: partial(theirs, name, numbers) for name in others}
    made = compile_all(session, {name: make for name, make in makers.items() if name in todo}, compiling)
    contenders = prepare(session, numbers, made, whats)
    costs = {name: dict(k.cost(*calls.taken(k, setting))) for name, k in kernels.items()}
    costs |= dict.fromkeys(others, work_of_dense(setting))
    guard = lambda name: session.guard(whats[name], SAMPLE_S)  # noqa: E731
    taken = clock.interleave(watch, {n: c.call for n, c in contenders.items()}, session.scale.rounds, guard)
    report(session, watch, setting, taken, whats, costs)


def most_bytes() -> float:
    """Return how many bytes a call's arrays may take on this device; infinity if jax knows no limit."""
    stats = jax.devices()[0].memory_stats() or {}
    return MOST_OF_JAX * stats.get("bytes_limit", float("inf"))


def drawn(session: Session, setting: Setting, op: str) -> Numbers | None:
    """Draw a call's numbers; return None if that fails, now or in an earlier attempt."""
    what = What(op=op, kernel="", workload=setting.words(), dtype=setting.dtype)
    if not session.is_done(what):
        with session.guard(what):
            return Numbers.fresh(setting)
    return None


def work_of_dense(setting: Setting) -> dict[str, float]:
    """Return flops and bytes of the dense call."""
    spec, shapes = setting.call("dense")
    return dict(work.decode("dense", spec, shapes) if setting.phase == "decode" else work.prefill(spec, shapes))


def compile_all(
    session: Session, makers: Mapping[str, Callable[[], Contender]], what: What
) -> Mapping[str, Callable[[], Contender]]:
    """Compile the contenders concurrently; return name -> function that returns the contender or raises its error.

    If that crashes or hangs the process, the retry of failed items compiles the contenders one by one.
    """
    if session.dry or session.retry:
        return makers
    with session.guard(what, COMPILE_S), ThreadPoolExecutor(4) as pool:
        return {name: pool.submit(make).result for name, make in makers.items()}
    return {}


def prepare(session: Session, numbers: Numbers, makers: Mapping[str, Callable[[], Contender]], whats) -> dict:
    """Return name -> contender; record an error for each contender that fails to compile or run, or answers wrongly."""
    contenders = {}
    for name, make in makers.items():
        with session.guard(whats[name]):
            contender = make()
            checked(contender, numbers)
            contenders[name] = contender
    return contenders


def ours(kernel: Kernel, numbers: Numbers, config: Any = None) -> Contender:
    """Build our kernel's contender, with tuned blocks if `config` is None. Its time does not include the selection."""
    setting = numbers.setting
    spec, shapes = calls.taken(kernel, setting)
    selection = jax.jit(partial(setting.selection, spec))(numbers.key) if kernel.role == "sparse" else None
    arguments = jax.block_until_ready((numbers.inputs[0], numbers.kv, numbers.positions, selection))
    compiled = calls.ready(kernel, spec, shapes, config)
    if not trials.is_simulated(kernel):
        compiled = compiled.lower(*arguments).compile()

    def call():
        with calls.machine(kernel):
            return jax.block_until_ready(compiled(*arguments))

    return Contender(call, spec, selection)


def theirs(name: str, numbers: Numbers) -> Contender:
    """Build a peer's dense contender."""
    return Contender(peers.PEERS[name](numbers.setting, *numbers.inputs), numbers.setting.call("dense")[0])


def checked(contender: Contender, numbers: Numbers) -> None:
    """Call the contender once and check its answer against float32.

    Raises:
        ValueError: the answer is wrong.
    """
    found = contender.call()
    if not hasattr(found, "lse"):
        found = AttentionOut(peers.as_jax(found), None, None)
    fault = check.fault(contender.spec, numbers.inputs, numbers.positions, contender.selection, found)
    if fault is not None:
        raise ValueError(fault)


def what_of(name: str, setting: Setting) -> What:
    """Return the `what` field for a record of the contender `name` and this call."""
    return What(op="gpu attention", kernel=name, workload=setting.words(), dtype=setting.dtype)


def report(session, watch, setting: Setting, taken: Mapping[str, clock.Samples], whats, costs) -> None:
    """Append a record per contender; compare our kernels with the fastest peer of this run."""
    rivals = {name: samples.device for name, samples in taken.items() if name in peers.PEERS}
    best = min(rivals, key=lambda name: sorted(rivals[name])[len(rivals[name]) // 2], default=None)
    for name, samples in taken.items():
        if session.is_good(whats[name]):  # recorded before, timed again only for comparison
            continue
        comparison = None
        if best is not None and name not in peers.PEERS:
            comparison = versus(best, rivals[best], samples.device, target_of(name, setting))
        session.add(
            whats[name],
            samples.device,
            how=method(session, watch),
            work=costs[name],
            comparison=comparison,
            facts={"host_s": sorted(samples.host)[len(samples.host) // 2]},
        )
    if setting.keys == LONG and best is not None:
        kascade(session, watch, setting, taken, best)


def target_of(name: str, setting: Setting) -> float | None:
    """Return the target for peer's time / our time; None if there is none."""
    if setting == SEED_SHAPE and name.endswith("dense"):
        return TARGETS["seed"]
    return TARGETS["dense prefill"] if name.endswith("dense") and setting.phase == "prefill" else None


def versus(against: str, theirs: list[float], mine: list[float], target: float | None) -> Comparison:
    """Compare the peer's median with ours: their ratio, its interval and the target."""
    ratio = timing.ratio(theirs, mine)
    goal, met = (None, None) if target is None else (f">= {target:g}", ratio >= target)
    return Comparison(against=against, ratio=ratio, interval=timing.ratio_interval(theirs, mine), target=goal, met=met)


def kascade(
    session: Session, watch: clock.Clock, setting: Setting, taken: Mapping[str, clock.Samples], best: str
) -> None:
    """Record Kascade's attention time over LAYERS layers, ANCHORS of them anchors, compared with the peer `best`.

    A sample adds up the layers' times from one round. An anchor scores and selects. `in_layers` times the selection.
    """
    what = What(op="gpu kascade", kernel="gpu", workload=setting.words(), dtype=setting.dtype)
    by_role = {role: taken[name].device for role in ROLES if (name := f"gpu_{setting.phase}_{role}") in taken}
    if len(by_role) == len(ROLES) and not session.is_done(what):
        session.attempt(what, partial(in_layers, session, watch, setting, by_role, (best, taken[best].device)))


def in_layers(session: Session, watch: clock.Clock, setting: Setting, by_role, rival: tuple[str, list[float]]) -> dict:
    """Time the selection on random masses, add it to the layers' times, and return the record's fields.

    A sample is the sum over all layers in one round.
    """
    spec, _ = setting.call("sparse")
    mass = jax.block_until_ready(setting.masses(spec, jax.random.key(0)))
    select = clock.waiting(jax.jit(partial(setting.select, spec)), mass)
    select()
    selecting = clock.interleave(watch, {"select": select}, session.scale.rounds)["select"].device
    rounds = zip(by_role["score"], selecting, by_role["sparse"], strict=True)
    mine = [ANCHORS * (score + chosen) + (LAYERS - ANCHORS) * sparse for score, chosen, sparse in rounds]
    target = TARGETS[f"kascade {setting.phase}"] if setting.batch == 1 else None
    return {
        "samples": mine,
        "how": method(session, watch),
        "comparison": versus(rival[0], [LAYERS * sample for sample in rival[1]], mine, target),
        "facts": {"layers": LAYERS, "anchors": ANCHORS, "selection_s": sorted(selecting)[len(selecting) // 2]},
    }


def method(session: Session, watch: clock.Clock) -> How:
    """Return how a call was timed, for its record."""
    return How(warmup=1, iterations=session.scale.rounds, interleaved=True, check=watch.method, cold_cache=watch.cold)
