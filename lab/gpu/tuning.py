"""Check and time every configuration of each kernel's search space on a few calls, and append a record for each.

The tuned block sizes stay as they are. The records are for people to read.
"""

from collections.abc import Iterator
from functools import partial

from lab.gpu import calls, clock
from lab.gpu.calls import LLAMA_8B, Setting
from lab.gpu.session import Session, until_late
from lab.gpu.timing import Numbers, checked, drawn, ours
from tessera.attention.kernel import Kernel
from tessera.measure.evidence import How, What

SETTINGS = (
    Setting(1, 16384, 16384, *LLAMA_8B),
    Setting(1, 1, 131072, *LLAMA_8B),
    Setting(16, 1, 32768, *LLAMA_8B),
    Setting(1, 16384, 16384, 32, 8, 64),
)
DRY = (Setting(1, 64, 64, 2, 1, 64), Setting(1, 1, 128, 2, 1, 64))


def run(session: Session) -> None:
    """Append a record per kernel, call and configuration. Do nothing in the first pass (`session.first`)."""
    if session.first:
        return
    watch = clock.Clock(session)
    for setting in DRY if session.dry else SETTINGS:
        todo = [item for item in candidates(session, setting) if not session.is_done(item[2])]
        numbers = drawn(session, setting, "gpu tuning") if todo else None
        if numbers is not None:
            for kernel, config, what in until_late(session, todo, 0 if session.dry else 15):
                session.attempt(what, partial(candidate, session, watch, kernel, numbers, config))


def candidates(session: Session, setting: Setting) -> Iterator[tuple[Kernel, object, What]]:
    """Yield (kernel, configuration, `what` of its record) for every configuration of the kernels that take the call.

    In a dry run, each kernel has only one configuration.
    """
    for kernel in calls.kernels_here(session, setting.phase):
        call = calls.taken(kernel, setting)
        configs = [] if call is None else list(kernel.search_space(*call))
        for config in configs[: 1 if session.dry else None]:
            words = f"{setting.words()}, {config}"
            yield kernel, config, What(op="gpu tuning", kernel=kernel.name, workload=words, dtype=setting.dtype)


def candidate(session: Session, watch: clock.Clock, kernel: Kernel, numbers: Numbers, config: object) -> dict:
    """Check one configuration's answer, time it, and return the record's fields.

    Raises:
        ValueError: the answer is wrong.
    """
    contender = ours(kernel, numbers, config)
    checked(contender, numbers)
    samples = clock.interleave(watch, {"it": contender.call}, session.scale.tune_rounds)["it"]
    how = How(warmup=1, iterations=len(samples.device), check=watch.method, cold_cache=watch.cold)
    work = dict(kernel.cost(*calls.taken(kernel, numbers.setting)))
    return {"samples": samples.device, "how": how, "work": work}
