"""Our GPU kernels and the peers on the same numbers, in turns, and what Kascade makes of them at 131,072 tokens."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax

from tessera import measure, trials
from tessera.attention import work
from tessera.attention.contract import Kernel
from tessera.evidence import Comparison, How, What
from tessera.gpu_check import calls, clock, peers
from tessera.gpu_check.calls import LLAMA_8B, LLAMA_70B, Setting
from tessera.gpu_check.session import ERRORS, Session, plain, until_late

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
"""What matters most comes first: the time may run out."""
DRY = (Setting(1, 64, 64, 2, 1, 64), Setting(1, 1, 128, 2, 1, 64))
MOST_KV_BYTES = 48e9
"""Larger calls are left out, with a record that says so."""

LAYERS, ANCHORS = 32, 5
ROLES = ("score", "sparse")
TARGETS = {"dense prefill": 0.95, "seed": 1.0, "kascade prefill": 3.4, "kascade decode": 5.0}
WRONG = 2e-2
"""Relative error of out at which a timed contender is refused."""


def run(session: Session) -> None:
    """A record per contender and call."""
    watch = clock.Clock(session)
    for setting in until_late(session, DRY if session.dry else SETTINGS, 0 if session.dry else 45):
        time_setting(session, watch, setting)


def time_setting(session: Session, watch: clock.Clock, setting: Setting) -> None:
    """All contenders of one call."""
    kernels = [k for k in calls.gpu_kernels(session, setting.phase) if calls.taken(k, setting)]
    names = [*(k.name for k in kernels), *peers.PEERS]
    whats = {name: what_of(name, setting) for name in names}
    if all(session.is_done(what) for what in whats.values()):
        return
    kv_bytes = 4.0 * setting.batch * setting.keys * setting.kv_heads * setting.head_dim
    if kv_bytes > MOST_KV_BYTES:
        for what in whats.values():
            session.add(what, (), error=f"left out: keys and values take {kv_bytes / 1e9:.0f} GB")
        return
    _, key = calls.fresh_key()
    inputs = jax.block_until_ready(setting.inputs(key))
    contenders = prepare(session, setting, kernels, inputs, key, whats)
    costs = {k.name: dict(k.cost(*calls.taken(k, setting))) for k in kernels}
    costs |= dict.fromkeys(peers.PEERS, work_of_dense(setting))
    taken = sampled(session, watch, contenders, whats)
    report(session, watch, setting, taken, whats, costs)


def work_of_dense(setting: Setting) -> dict[str, float]:
    """Flops and bytes of the dense call."""
    spec, shapes = setting.call("dense")
    return dict(work.decode("dense", spec, shapes) if setting.phase == "decode" else work.prefill(spec, shapes))


def prepare(session: Session, setting: Setting, kernels, inputs: tuple, key: jax.Array, whats) -> dict[str, Callable]:
    """Name -> call; what does not compile, run or agree becomes a record at once.

    Each contender is tried once: its dense output must agree with the first dense one's.
    """
    makers: dict[str, Callable[[], Any]] = {k.name: partial(ours, k, setting, inputs, key) for k in kernels}
    makers |= {name: partial(peer, setting, *inputs) for name, peer in peers.PEERS.items()}
    contenders, first = {}, None
    with ThreadPoolExecutor(1 if session.dry else 4) as pool:
        made = {name: pool.submit(attempt, make) for name, make in makers.items()}
    for name, future in made.items():
        call, error = future.result()
        out = None
        if error is None:
            out, error = attempt(partial(tried, call))
        if error is None and not name.endswith("sparse"):
            first = out if first is None else first
            difference = calls.relative_error(out, first)
            error = None if difference <= WRONG else f"wrong: {difference:.3g} away from the first contender"
        if error is None:
            contenders[name] = call
        elif not session.is_done(whats[name]):
            session.add(whats[name], (), error=error)
    return contenders


def ours(kernel: Kernel, setting: Setting, inputs: tuple, key: jax.Array, config: Any = None) -> Callable[[], Any]:
    """A compiled call of our kernel, of the tuned blocks if no config is given; its selection is made before."""
    spec, shapes = calls.taken(kernel, setting)
    selection = jax.jit(partial(setting.selection, spec))(key) if kernel.role == "sparse" else None
    q, k, v = inputs
    arguments = jax.block_until_ready((q, *calls.as_cached(k, v), setting.positions(), selection))
    compiled = calls.ready(kernel, spec, shapes, config)
    if not trials.is_simulated(kernel):
        compiled = compiled.lower(*arguments).compile()

    def call():
        with calls.machine(kernel):
            return jax.block_until_ready(compiled(*arguments))

    return call


def tried(call: Callable[[], Any]) -> Any:
    """The output of one call."""
    found = call()
    return found.out if hasattr(found, "lse") else peers.as_jax(found)


def attempt(make: Callable[[], Any]) -> tuple[Any, str | None]:
    """(result, None) or (None, error)."""
    try:
        return make(), None
    except ERRORS as error:
        return None, plain(error)


def sampled(session: Session, watch: clock.Clock, contenders: Mapping, whats: Mapping) -> dict[str, clock.Samples]:
    """Samples of all, or records of the error that ended them."""
    try:
        return clock.interleave(watch, contenders, session.scale.rounds)
    except ERRORS as error:
        for name in contenders:
            session.add(whats[name], (), error=plain(error))
        return {}


def what_of(name: str, setting: Setting) -> What:
    """The measurement's key."""
    return What(op="gpu attention", kernel=name, workload=setting.words(), dtype=setting.dtype)


def report(session, watch, setting: Setting, taken: Mapping[str, clock.Samples], whats, costs) -> None:
    """A record per contender; ours against the best peer of this very run."""
    rivals = {name: samples.device for name, samples in taken.items() if name in peers.PEERS}
    best = min(rivals, key=lambda name: sorted(rivals[name])[len(rivals[name]) // 2], default=None)
    how = How(warmup=1, iterations=session.scale.rounds, interleaved=True, check=watch.method, cold_cache=watch.cold)
    for name, samples in taken.items():
        comparison = None
        if best is not None and name not in peers.PEERS:
            comparison = versus(best, rivals[best], samples.device, target_of(name, setting))
        session.add(
            whats[name],
            samples.device,
            how=how,
            work=costs[name],
            comparison=comparison,
            facts={"host_s": sorted(samples.host)[len(samples.host) // 2]},
        )
    if setting.keys == LONG and best is not None:
        kascade(session, setting, taken, best, how)


def target_of(name: str, setting: Setting) -> float | None:
    """The ratio that was promised."""
    if setting == SEED_SHAPE and name.endswith("dense"):
        return TARGETS["seed"]
    return TARGETS["dense prefill"] if name.endswith("dense") and setting.phase == "prefill" else None


def versus(against: str, theirs: list[float], mine: list[float], target: float | None) -> Comparison:
    """The peer's median over ours, with its interval."""
    ratio = measure.ratio(theirs, mine)
    goal, met = (None, None) if target is None else (f">= {target:g}", ratio >= target)
    return Comparison(against=against, ratio=ratio, interval=measure.ratio_interval(theirs, mine), target=goal, met=met)


def kascade(session: Session, setting: Setting, taken: Mapping[str, clock.Samples], best: str, how: How) -> None:
    """Attention of a model of 32 layers, 5 of them anchors that score and select, against the peer in every layer.

    Added up from samples of the same round, layer by layer; selection is timed here.
    """
    by_role = {role: taken[name].device for role in ROLES if (name := f"gpu_{setting.phase}_{role}") in taken}
    if len(by_role) < len(ROLES):
        return
    spec, _ = setting.call("sparse")
    select = jax.jit(partial(setting.selection, spec))
    watch, key = clock.Clock(session), jax.random.key(0)
    jax.block_until_ready(select(key))
    selecting = clock.interleave(watch, {"select": clock.waiting(select, key)}, session.scale.rounds)["select"].device
    rounds = zip(by_role["score"], selecting, by_role["sparse"], strict=True)
    mine = [ANCHORS * (score + chosen) + (LAYERS - ANCHORS) * sparse for score, chosen, sparse in rounds]
    theirs = [LAYERS * sample for sample in taken[best].device]
    target = TARGETS[f"kascade {setting.phase}"] if setting.batch == 1 else None
    session.add(
        What(op="gpu kascade", kernel="gpu", workload=setting.words(), dtype=setting.dtype),
        mine,
        how=how,
        comparison=versus(best, theirs, mine, target),
        facts={"layers": LAYERS, "anchors": ANCHORS, "selection_s": sorted(selecting)[len(selecting) // 2]},
    )
