"""Lines that `tessera generate` prints after its answers: what each answer cost and, with --stats, which shares of the
device's peak rates it reached."""

import jax

from tessera.measure.timing import ceilings
from tessera.runtime.meters import Peaks, nominal_peaks, use
from tessera.sparse.promise import promise_note


def usage_lines(model, results) -> list[str]:
    """Return a line per answer with its cost and the plan's promise; no lines if there is no promise."""
    note = promise_note(model.plan)
    return [f"({result.usage()}; {note})" for result in results if note]


def stats_lines(model, results) -> list[str]:
    """Return a line per answer with its cost and its shares of the device's peak rates, and a line with those rates."""
    note, peaks = promise_note(model.plan), nominal_peaks(model.params)
    if peaks is None and model.params.final_norm.sharding.device_set == {local_cpu()}:
        found, dtype = ceilings(rounds=3), str(model.params.embed.dtype)
        peaks = Peaks(
            flops_per_s=found.flops_per_s[dtype], bytes_per_s=found.bytes_per_s, source=f"measured now in {dtype}"
        )
    lines = [
        "; ".join(
            filter(None, (result.usage(), str(use(result, model.config, model.params, model.kv_dtype, peaks)), note))
        )
        for result in results
    ]
    if peaks is None:
        return [*lines, "peak rates of this device: unknown"]
    rates = f"{peaks.flops_per_s / 1e9:,.0f} GFLOP/s, {peaks.bytes_per_s / 1e9:,.0f} GB/s"
    return [*lines, f"peak rates, {peaks.source}: {rates}; a first run's times include compiling"]


def local_cpu():
    """Return the CPU if it is this process's only device, else None."""
    devices = jax.devices()
    return devices[0] if len(devices) == 1 and devices[0].platform == "cpu" else None
