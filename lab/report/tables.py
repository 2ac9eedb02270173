"""Render tables of evaluation, tuning and compilation: policies, plans, speed, block sizes, gates, sweeps."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lab.report.markdown import Table, interval, markdown, newest, provenance, ratio_of, result_of, title_of
from tessera.core.units import quantity, three
from tessera.measure.evidence import Record

HELD_OUT = "held-out text"
"""Start of the workload name of each record that measures closeness to dense."""
MASS = "attention mass"
"""Start of the workload name of each record that measures the attention mass kept by a policy."""
PASS_KEY = "single"
"""Kind of the only task in the study of a plan's settings: find a pass key."""


def policies(records: Sequence[Record]) -> Table:
    """Compare policies on every kind of task at the longest length, and show how close they are to dense.

    A column for the attention mass kept appears if a record holds it.
    """
    chosen = _evaluated(records, "demo")
    longest = max((length for _, length in map(_kind, chosen) if length), default=0)
    used = [r for r in chosen if _kind(r)[1] in (longest, None)]
    kinds = list(dict.fromkeys(kind for kind, length in map(_kind, used) if length))
    has_mass, rows = any(_kind(r)[0] == MASS for r in used), []
    for (policy, machine), own in _by_policy(used).items():
        asked = {_kind(r)[0]: r for r in own}
        tasks = [asked[kind] for kind in kinds if kind in asked]
        fidelity = asked.get(HELD_OUT)
        agreement = quantity(fidelity.facts["agreement"], "fraction") if _good(fidelity) else ""
        scores = [_score(asked.get(kind)) for kind in kinds]
        mass = [_mass(asked.get(MASS))] if has_mass else []
        rows.append([policy, machine, *scores, _mean_density(tasks), *mass, _divergence(fidelity), agreement])
    header = [f"policy, tasks of {longest:,} tokens", "machine", *(kind.replace("_", " ") for kind in kinds)]
    header += ["keys read", *(["attention mass kept (95 %)"] if has_mass else [])]
    header += ["KL per token, nats (95 %)", "same best guess"]
    return Table(header, rows, used)


def granularity(records: Sequence[Record]) -> Table:
    """Show KL per token and the share of pass keys found: a row per tile size, a column per query tile size."""
    chosen = [r for r in _evaluated(records, "study") if _tiles(r)]
    columns = sorted({_tiles(r)[1] for r in chosen})
    cells: dict[tuple[int, str], dict[int, list[Record]]] = {}
    for record in chosen:
        keys, queries = _tiles(record)
        cells.setdefault((keys, record.where.machine), {}).setdefault(queries, []).append(record)
    rows = [
        [str(keys), machine, *(_closeness(found.get(queries, [])) for queries in columns)]
        for (keys, machine), found in sorted(cells.items())
    ]
    header = ["KL per token, nats (95 %); pass keys: keys per tile", "machine", *(f"{n} queries" for n in columns)]
    return Table(header, rows, chosen)


def study(records: Sequence[Record]) -> Table:
    """Show the unchanged plan, then the plans that differ from it in one setting other than the tile sizes."""
    chosen = _evaluated(records, "study")
    plain = {
        f"tile {r.what.config['tile']}, query tile {r.what.config['query_tile']}": "the plan as it is"
        for r in chosen
        if _policy(r).startswith("fraction ") and "tile" in r.what.config
    }
    used = [r for r in chosen if not _tiles(r) or _policy(r) in plain]
    used.sort(key=lambda r: _policy(r) not in plain)
    rows = []
    for (policy, machine), own in _by_policy(used).items():
        asked = {_kind(r)[0]: r for r in own}
        fidelity, keys = asked.get(HELD_OUT), asked.get(PASS_KEY)
        names = ("perplexity", "perplexity_dense")
        perplexity = "{} ({})".format(*(three(fidelity.facts[n]) for n in names)) if _good(fidelity) else ""
        found = f"{_found(keys)}{_range(keys)}" if _good(keys) else _failed(keys)
        shown = plain.get(policy, policy)
        rows.append([shown, machine, _divergence(fidelity), perplexity, found, _mean_density(own)])
    header = ["plan", "machine", "KL per token, nats (95 %)", "perplexity (dense)", "pass keys (95 %)", "keys read"]
    return Table(header, rows, used)


def _evaluated(records: Iterable[Record], suite: str) -> list[Record]:
    """Select the records of a `tessera eval` suite with the settings of the newest record of their policy and machine.

    The settings include the plan: after a plan changes, a cell stays empty until it is measured under the new plan.
    """
    asked = [r for r in records if r.what.op.startswith("eval ") and (r.suite, r.case) == (suite, "")]
    newest_of = {lead: max(own, key=lambda r: r.date) for lead, own in _by_policy(asked).items()}
    return [r for r in asked if r.what.config == newest_of[_policy(r), r.where.machine].what.config]


def _policy(record: Record) -> str:
    """Return the policy's title, which the workload of every `tessera eval` record holds."""
    return record.what.workload.partition(": ")[2]


def _kind(record: Record) -> tuple[str, int | None]:
    """Return (kind of task, tokens) for a task's record, else (HELD_OUT, None) or (MASS, None)."""
    kind, _, length = record.what.workload.partition(": ")[0].partition(" at ")
    return kind, int(length) if length else None


def _tiles(record: Record) -> tuple[int, int] | None:
    """Return (tile, query tile) if the record's policy changes these sizes, else None."""
    if not _policy(record).startswith("tile "):
        return None
    tile, query_tile = _policy(record).split(", ")
    return int(tile.removeprefix("tile ")), int(query_tile.removeprefix("query tile "))


def _by_policy(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    """Group records by policy and machine, with the machines of one policy next to each other."""
    groups: dict[str, dict[tuple[str, str], list[Record]]] = {}
    for record in records:
        lead = (_policy(record), record.where.machine)
        groups.setdefault(lead[0], {}).setdefault(lead, []).append(record)
    return {lead: own for group in groups.values() for lead, own in group.items()}


def _good(record: Record | None) -> bool:
    return record is not None and not record.error


def _failed(record: Record | None) -> str:
    return result_of(record) if record is not None and record.error else ""


def _range(record: Record) -> str:
    """Format the interval of a share of right answers."""
    low, high = (f"{100 * record.facts[end]:.0f}" for end in ("low", "high"))
    return interval(low, f"{high} %", len(record.facts["scores"]))


def _score(record: Record | None) -> str:
    return f"{100 * record.median:.0f} %{_range(record)}" if _good(record) else _failed(record)


def _found(record: Record) -> str:
    scores = record.facts["scores"]
    return f"{sum(score == 1 for score in scores)}/{len(scores)}"


def _divergence(record: Record | None) -> str:
    if not _good(record):
        return _failed(record)
    mean, low, high = (three(record.facts[name]) for name in ("mean", "low", "high"))
    return mean + interval(low, high, len(record.samples))


def _mass(record: Record | None) -> str:
    """Format the attention mass kept, with one more digit than scores have, since it is near 100 %."""
    if not _good(record):
        return _failed(record)
    mean, low, high = (f"{100 * record.facts[name]:.1f}" for name in ("mean", "low", "high"))
    return f"{mean} %" + interval(low, f"{high} %", len(record.samples))


def _closeness(records: Iterable[Record]) -> str:
    """Format a cell of the granularity table: closeness to dense, then pass keys; a missing part is left out."""
    asked = {_kind(r)[0]: r for r in records}
    keys = asked.get(PASS_KEY)
    found = _found(keys) if _good(keys) else _failed(keys)
    return "; ".join(filter(None, [_divergence(asked.get(HELD_OUT)), found]))


def _mean_density(tasks: Sequence[Record]) -> str:
    read = [r.mean_density for r in tasks if r.density]
    return f"{100 * sum(read) / len(read):.1f} %" if read else ""


def amdahl(records: Sequence[Record]) -> Table:
    """Show the measured gain of a sparse prefill next to the gain that Amdahl's law predicts (`bench/amdahl.py`)."""
    chosen = [r for r in records if "attention_gain" in r.facts and r.comparison and not r.error]
    rows = []
    for record in chosen:
        facts = record.facts
        law = f"{facts['amdahl_gain']:.2f}x" if "amdahl_gain" in facts else "attention alone took longer than the whole"
        parts = [quantity(facts["attention_share"], "fraction"), f"{facts['attention_gain']:.2f}x"]
        rows.append([title_of(record), record.where.machine, *parts, law, ratio_of(record)])
    header = ["workload", "machine", "attention's share of dense", "attention alone gains", "gain by Amdahl's law"]
    return Table([*header, "measured (95 %)"], rows, chosen)


def use(records: Sequence[Record]) -> Table:
    """Show each whole-model call's shares of peak flops and bandwidth: a row per call and policy or peer."""
    chosen = [r for r in records if "mfu" in r.facts and not r.error]
    machines = sorted({r.where.machine for r in chosen})
    calls: dict[tuple[str, str], dict[str, Record]] = {}
    for record in chosen:
        calls.setdefault((title_of(record), record.what.kernel), {})[record.where.machine] = record
    rows = [[*lead, *(_used(found.get(machine)) for machine in machines)] for lead, found in calls.items()]
    return Table(["flops; bandwidth in use", "", *machines], rows, chosen)


def _used(record: Record | None) -> str:
    """Format the shares that a call used of the measured peak rates and, if stored, of the data sheet's peak rates."""
    if record is None:
        return ""
    pairs = [(record.facts.get(f"mfu{end}"), record.facts.get(f"bandwidth_share{end}")) for end in ("", "_nominal")]
    measured, nominal = ("; ".join(quantity(x, "fraction") for x in pair if x is not None) for pair in pairs)
    return f"{measured} (data sheet: {nominal})" if nominal else measured


def tune(records: Sequence[Record]) -> Table:
    """Show block sizes found by timing: the result of each search, and how well its cheap stages ranked candidates."""
    chosen = [r for r in records if r.what.op == "tune"]
    rows = []
    for record in chosen:
        facts = record.facts
        default, tried = facts.get("default", {}), facts.get("candidates", [])
        ranks = facts.get("rank_correlation", {})
        names = ("seed_model_with_quick", "seed_model_with_final", "quick_with_final")
        best = _failed(record) or _best(record)
        failed = sum(entry["error"] is not None for entry in tried)
        rows.append(
            [
                record.what.workload,
                record.where.machine,
                record.what.kernel,
                _settings(default),
                best,
                _search(record),
                "" if record.error else f"{record.median:.2f}x{_interval(record)}",
                f"{len(tried)}" + (f", {failed} failed" if failed else "") if tried else "",
                *("" if ranks.get(name) is None else f"{ranks[name]:.2f}" for name in names),
            ]
        )
    header = ["workload", "machine", "kernel", "default", "best", "search", "gain (95 %)", "candidates"]
    header += ["rank correlation: model and quick", "model and final", "quick and final"]
    return Table(header, rows, chosen)


def _search(record: Record) -> str:
    """Name the search method, and whether the cost model or a random draw chose its first candidates."""
    method, tried = record.suite or "genetic", record.facts.get("candidates")
    if not tried:
        return method
    by_model = any(entry.get("origin") == "seed" for entry in tried)
    return f"{method}, {'seeded by the model' if by_model else 'random seeds'}"


def _best(record: Record) -> str:
    """Format how the chosen config differs from the default. If it does not, name the refused winner, if any."""
    default, refused = record.facts["default"], record.facts.get("refused")
    if record.what.config != default:
        return _settings(record.what.config, default)
    return "the default" + (f"; not confirmed: {_settings(refused, default)}" if refused else "")


def _interval(record: Record) -> str:
    """Format the gain's interval; omit it if the winner was refused, since the stored interval is the winner's."""
    facts = record.facts
    if facts.get("interval") is None or "refused" in facts:
        return ""
    return interval(*(f"{end:.2f}" for end in facts["interval"]), record.how.iterations)


def _settings(config: Mapping[str, Any], default: Mapping[str, Any] | None = None) -> str:
    """Format a configuration's names and values; with `default`, only the values that differ from it."""
    default = default or {}
    return ", ".join(f"{name} {value}" for name, value in config.items() if default.get(name, default) != value)


def blocks(records: Sequence[Record]) -> str:
    """Show block sizes of the TPU kernels, chosen by predicted time: a row per call, a column per chip."""
    chosen = newest(r for r in records if r.what.op == "block sizes")
    calls: dict[tuple[str, str], dict[str, Record]] = {}
    for record in chosen:
        call, _, chip = record.what.workload.rpartition(", ")
        calls.setdefault((record.what.kernel, call), {})[chip] = record
    chips = sorted({record.what.workload.rpartition(", ")[2] for record in chosen})
    rows = [[*lead, *(_chosen_blocks(found.get(chip)) for chip in chips)] for lead, found in sorted(calls.items())]
    return markdown(["kernel", "call, predicted", *chips], rows) + provenance(chosen) if rows else ""


def _chosen_blocks(record: Record | None) -> str:
    """Format the predicted time, the gain over the default, and the settings that differ from the default."""
    if record is None or record.error:
        return _failed(record)
    default = record.facts["default"].get("config", {})
    if record.what.config == default:
        return f"{result_of(record)}, default"
    gain = f"{record.comparison.ratio:.2f}x" if record.comparison else "the default does not compile"
    return f"{result_of(record)}, {gain}: {_settings(record.what.config, default)}"


def choices(records: Sequence[Record]) -> str:
    """Show the gain of each design choice of the TPU prefill kernel: a row per choice undone, a column per chip."""
    chosen = newest(r for r in records if r.what.op == "kernel choice")
    found = {(r.facts["choice"], r.facts["chip"]): r for r in chosen}
    chips = sorted({chip for _, chip in found})
    names = dict.fromkeys(choice for choice, _ in found)
    rows = [[name, *(_undone(found, name, chip) for chip in chips)] for name in names]
    return markdown(["undone, predicted", *chips], rows) + provenance(chosen) if rows else ""


def _undone(found: Mapping[tuple[str, str], Record], name: str, chip: str) -> str:
    """Format time and main-loop cycles: absolute for the kernel "as it is", else as multiples of its values."""
    record = found.get((name, chip))
    if record is None or record.error:
        return _failed(record)
    if record.facts["choice"] == "as it is" or record.comparison is None:
        return f"{result_of(record)}; {record.facts['full']['cycles']:,} cycles"
    whole = found["as it is", chip].facts["full"]["cycles"]
    return f"{1 / record.comparison.ratio:.2f}x; {record.facts['full']['cycles'] / whole:.2f}x"


def gates(records: Sequence[Record]) -> str:
    """Show, for each Hopper kernel, passed cases and maximum registers, spills and shared memory; failures in bold."""
    rows, chosen = [], []
    for (kernel, chip), own in gated(records).items():
        chosen += own
        passed, cases, planned = gate_counts(own)
        reports = [report for r in own for *_, found in r.facts.get("reports", ()) for report in found]
        spilled = max((sum(report["spill_bytes"]) for report in reports), default=None)
        shared = max((report["shared_bytes"] for report in reports), default=None)
        errors = "; ".join(_failed(r) for r in own if r.error)
        rows.append(
            [
                f"{kernel}, {chip}",
                str(len(own)),
                f"{cases:,} of {planned:,}" if planned > cases else f"{cases:,}",
                _share(passed, cases) + (f"; {errors}" if errors else ""),
                str(max((report["registers"] for report in reports), default="")),
                "" if spilled is None else f"**{spilled}**" if spilled else "0",
                "" if shared is None else quantity(shared, "bytes"),
            ]
        )
    header = [
        "kernel",
        "configurations",
        "cases",
        "passed",
        "most registers",
        "most bytes spilled",
        "most shared memory",
    ]
    return markdown(header, rows) + provenance(chosen) if rows else ""


def gated(records: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    """Return (kernel, chip) -> records of the kernel's last run of the gates, sorted by kernel and chip."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in newest(r for r in records if r.what.op == "gpu gates"):
        groups.setdefault((record.what.kernel, record.what.workload.rpartition(", ")[2]), []).append(record)
    return {lead: last_run(own) for lead, own in sorted(groups.items())}


def gate_counts(own: Sequence[Record]) -> tuple[int, int, int]:
    """Return the numbers of one kernel's cases that passed every gate, that were tried, and that were planned."""
    passed = sum(round(r.median * r.facts["cases"]) for r in own if not r.error)
    planned = max((r.facts.get("planned", 0) for r in own), default=0)
    return passed, sum(r.facts.get("cases", 0) for r in own), planned


def last_run(records: Sequence[Record]) -> list[Record]:
    """Return the records of a kernel's last run: the newest ones, up to the number of cases that this run tried.
    This leaves out older records, whose configurations are no longer in the search space."""
    ordered = sorted(records, key=lambda r: r.date, reverse=True)
    left, kept = ordered[0].facts.get("tried", math.inf), []
    for record in ordered:
        if left <= 0:
            break
        kept.append(record)
        left -= record.facts.get("cases", 0)
    return kept


def rooflines(records: Sequence[Record]) -> str:
    """Show the Hopper kernels' figures at the roofline, with their targets; a target beyond the roofline is in bold."""
    chosen = newest(r for r in records if r.what.op == "roofline figure")
    rows = []
    for record in chosen:
        share = record.facts.get("of_roofline")
        shown = "" if share is None else quantity(share, "fraction")
        rows.append(
            [
                record.what.workload,
                record.facts["target"] or "",
                result_of(record),
                f"**{shown}**" if share is not None and share > 1 else shown,
                _machine_code(record),
            ]
        )
    header = ["figure", "target", "at the roofline, not measured", "target as share of the roofline"]
    header.append("registers, bytes spilled")
    return markdown(header, rows) + provenance(chosen) if rows else ""


def _machine_code(record: Record) -> str:
    """Format the highest register count and the most spilled bytes of the figure's calls, and failed gates in bold."""
    calls = [call for call in record.facts.values() if isinstance(call, Mapping) and call.get("registers")]
    if not calls:
        return ""
    most = ", ".join(str(max(call[name] or 0 for call in calls)) for name in ("registers", "spill_bytes"))
    broken = [text for call in calls for text in call["gates"] or ()]
    return f"{most}: **{'; '.join(broken)}**" if broken else most


def _share(good: int, of: int) -> str:
    return f"{good:,}" if good == of else f"**{good:,}**"


def sweep(records: Sequence[Record]) -> str:
    """Show how many cases compiled: a row per TPU kernel, a column per chip; counts with failures in bold.

    A later sweep of only some kernels replaces only those kernels' rows.
    """
    chosen, counts, planned = swept(records)
    if not chosen:
        return ""
    chips = sorted({chip for _, chip in counts})
    groups = [(name, (name,)) for name in sorted({kernel for kernel, _ in counts})]
    groups.append(("all", tuple(name for name, _ in groups)))
    rows = [
        [title, *(_compiled([counts[name, chip] for name in names if (name, chip) in counts]) for chip in chips)]
        for title, names in groups
    ]
    tried = sum(pair[1] for pair in counts.values())
    late = sum(r.facts.get("ended_by_time", 0) for r in chosen)
    lead = f"compiled/tried; tried {tried:,} of {planned:,} planned"
    lead += f", {late:,} ended by the time limit" if late else ""
    return markdown([lead, *chips], rows) + provenance(chosen)


def swept(records: Sequence[Record]) -> tuple[list[Record], dict[tuple[str, ...], Sequence[int]], int]:
    """Return the sweeps' records, their counts (compiled, tried) by (kernel, chip), and the number of cases planned."""
    chosen = sorted(newest(r for r in records if r.what.op == "tpu sweep" and not r.error), key=lambda r: r.date)
    counts: dict[tuple[str, ...], Sequence[int]] = {}
    planned = 0
    for facts in (r.facts for r in chosen):
        again = {name.partition(" on ")[0] for name in facts["by_kernel"]}
        planned += facts["planned"] - sum(tried for (kernel, _), (_, tried) in counts.items() if kernel in again)
        counts |= {tuple(name.split(" on ")): pair for name, pair in facts["by_kernel"].items()}
    return chosen, counts, planned


def _compiled(pairs: Sequence[Sequence[int]]) -> str:
    good, tried = (sum(column) for column in zip(*pairs)) if pairs else (0, 0)
    return f"{_share(good, tried)}/{tried:,}" if tried else ""
