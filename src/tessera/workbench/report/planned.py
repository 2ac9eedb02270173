"""The table of `tessera study planner`."""

from collections.abc import Sequence

from tessera.core.units import three
from tessera.workbench.evidence import Record
from tessera.workbench.report.markdown import markdown, newest, provenance, quantity


def steps(records: Sequence[Record]) -> str:
    """Show planned against compiled memory of whole steps, and planned times against those of the schedules."""
    chosen = newest(r for r in records if r.what.op == "planned step")
    rows = []
    for record in chosen:
        facts = record.facts
        mine = quantity(facts["planned_bytes"], "bytes")
        if facts["hbm_bytes"] is None:
            verdict = "fits: **wrong**" if facts["fits"] else "does not fit"
            rows.append([record.what.workload, record.what.kernel, f"{mine}: {verdict}", "refused", "", ""])
            continue
        held, error = quantity(facts["hbm_bytes"], "bytes"), f"{100 * (record.median - 1):+.2f} %"
        times = ""
        if "planned_ms" in facts:
            ratio = facts["planned_ms"] / facts["predicted_ms"] - 1
            times = f"{three(facts['planned_ms'])} of {three(facts['predicted_ms'])} ms, {100 * ratio:+.1f} %"
        rows.append([record.what.workload, record.what.kernel, mine, held, error, times])
    header = ["step", "attention", "planned", "compiled", "error", "planned of scheduled time"]
    return markdown(header, rows) + provenance(chosen) if rows else ""
