"""A bounded search: every configuration of a kernel's search space on a few calls, a record each, then the best."""

from functools import partial

import jax

from tessera.evidence import How, What
from tessera.gpu_check import calls, clock
from tessera.gpu_check.calls import LLAMA_8B, Setting
from tessera.gpu_check.session import Session, until_late
from tessera.gpu_check.timing import ours

SETTINGS = (
    Setting(1, 16384, 16384, *LLAMA_8B),
    Setting(1, 1, 131072, *LLAMA_8B),
    Setting(16, 1, 32768, *LLAMA_8B),
    Setting(1, 16384, 16384, 32, 8, 64),
)
DRY = (Setting(1, 64, 64, 2, 1, 64), Setting(1, 1, 128, 2, 1, 64))


def run(session: Session) -> None:
    """A record per kernel, call and configuration."""
    watch = clock.Clock(session)
    for setting in DRY if session.dry else SETTINGS:
        for kernel in calls.gpu_kernels(session, setting.phase):
            call = calls.taken(kernel, setting)
            if call is None:
                continue
            spec, shapes = call
            what = What(op="gpu tuning", kernel=kernel.name, workload=setting.words(), dtype=setting.dtype)
            configs = list(kernel.search_space(spec, shapes))[: 1 if session.dry else None]
            for config in until_late(session, configs, 0 if session.dry else 15):
                named = What(**{**vars(what), "workload": f"{what.workload}, {config}"})
                session.attempt(named, partial(candidate, session, watch, kernel, setting, config))


def candidate(session: Session, watch: clock.Clock, kernel, setting: Setting, config) -> dict:
    """Samples of one configuration."""
    _, key = calls.fresh_key()
    inputs = jax.block_until_ready(setting.inputs(key))
    call = ours(kernel, setting, inputs, key, config)
    call()
    samples = clock.interleave(watch, {"it": call}, session.scale.tune_rounds)["it"]
    how = How(warmup=1, iterations=len(samples.device), check=watch.method, cold_cache=watch.cold)
    return {"samples": samples.device, "how": how, "work": dict(kernel.cost(*calls.taken(kernel, setting)))}
