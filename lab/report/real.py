"""Render the tables of `tessera eval --suite real`: a row per question, a column per contender.

A contender is the plan, or a policy that reads as many keys but chooses them by another rule. The control is the plan
without the far keys that it selects.
"""

from collections.abc import Callable, Iterable, Sequence

from lab.report.markdown import interval, keys_read, markdown, newest, provenance
from tessera.core.units import three
from tessera.measure.evidence import Record
from tessera.measure.judge import paired
from tessera.measure.judge.contenders import EXACT, NEAR, OTHER, PLAN, WINDOW

TEXT, TASK = "eval real text", "eval real task"
COLUMNS = (
    "the plan",
    "control: nothing far",
    NEAR,
    "window + sink",
    EXACT,
    "mean keys of 4",
    "min and max",
    "random tiles",
)
"""Titles of contenders, in the order of columns. A contender without a record has no column."""
TILES = tuple(f"own choice, tile {tile}" for tile in (1, 16, 32, 64))
GAPS = ("the plan", "mean keys of 4", "window + sink")
"""Titles of the contenders whose divergence `gaps` divides by the divergence of EXACT."""
PEERS = {
    "transformers": "transformers, on the converted folder",
    "llama_cpp_exact": "llama.cpp, on the same weights in F32",
    "llama_cpp_own": "llama.cpp, on the file itself",
}
"""Workload -> title of the peer that a GGUF file's logits are compared with."""
UNTOLD = " (says nothing about the choice of keys)"


def answered(records: Iterable[Record], op: str, alone: bool = False) -> list[Record]:
    """Select the records of `op` from one run at one commit: the run with the most records (ties: the latest).

    A plan runs dense below its cross-over. The choice of keys `alone` is what the plan does without one, from the first
    token; by default, a run with a cross-over is preferred, which is what users get.

    The contender NEAR reads all keys in the heads where the plan does, and a window in the others. If the plan has no
    such heads, NEAR equals the window and is left out.
    """
    groups: dict[tuple[str | None, ...], list[Record]] = {}
    for record in records:
        if record.what.op == op and not record.error:
            groups.setdefault((record.where.machine, *record.run, record.code.commit), []).append(record)
    crossed = [own for own in groups.values() if any(r.what.config.get("crossover_tokens") for r in own)]
    runs = [own for own in groups.values() if own not in crossed] if alone else crossed or list(groups.values())
    run = max(runs, key=lambda own: (len(own), max(r.date for r in own)), default=[])
    return [r for r in run if r.facts["policy"] != NEAR or any(map(any, r.what.config["whole"]))]


def text(records: Sequence[Record], alone: bool = False) -> str:
    """Show each contender's KL divergence from dense, by domain and range of positions."""
    return _by_question(answered(records, TEXT, alone), COLUMNS, _divergence, "KL per token, nats (95 %); keys read")


def tasks(records: Sequence[Record], alone: bool = False) -> str:
    """Show the share of dense's right answers that each contender keeps, by kind and length."""
    lead = "kept of dense's answers (95 %); p; keys read"
    return _by_question(answered(records, TASK, alone), COLUMNS, _kept, lead)


def tiles(records: Sequence[Record]) -> str:
    """Show what tile size costs if every layer chooses tiles by its own exact attention: on text, then on questions."""
    shown = [*answered(records, TEXT, alone=True), *answered(records, TASK, alone=True)]
    cell = {TEXT: _divergence, TASK: _kept}
    return _by_question(shown, TILES, lambda r: cell[r.what.op](r), "every layer's own exact choice")


def gaps(records: Sequence[Record]) -> str:
    """Show each contender's divergence as a multiple of the divergence of EXACT.

    Under EXACT, every layer chooses tiles by its own exact attention, and reads as many keys as under the plan.
    """
    found = answered(records, TEXT, alone=True)
    exact = {_question(r): r for r in found if r.facts["policy"] == EXACT}
    shown = [r for r in found if _question(r) in exact and r.facts["policy"] in GAPS]
    return _by_question(
        [*exact.values(), *shown],
        (EXACT, *GAPS),
        lambda r: _divergence(r) if r.facts["policy"] == EXACT else _times(r, exact[_question(r)]),
        "KL per token, nats (95 %), and how many times that (95 %); keys read",
    )


def others(records: Iterable[Record]) -> str:
    """Compare other plans with the evaluated plan, on text, then on questions, in the largest run with other plans."""
    runs = {(r.run, r.code.commit) for r in records if str(r.facts.get("policy", "")).startswith(OTHER)}
    run = [r for r in records if (r.run, r.code.commit) in runs]
    shown, cell = [*answered(run, TEXT), *answered(run, TASK)], {TEXT: _divergence, TASK: _kept}
    titles = list(dict.fromkeys(r.facts["policy"] for r in shown if r.facts["policy"].startswith(OTHER)))
    lead = "KL per token, nats (95 %), or answers kept of dense's (95 %); keys read"
    return _by_question(shown, (PLAN, *titles, WINDOW), lambda r: cell[r.what.op](r), lead)


def weights(records: Iterable[Record]) -> str:
    """Show that a GGUF file is read correctly: logits against transformers, best tokens against llama.cpp."""
    found = {r.what.workload: r for r in newest(r for r in records if r.what.op == "gguf fidelity" and not r.error)}
    rows = []
    for name, peer in PEERS.items():
        if name not in found:
            continue
        facts = found[name].facts
        if name == "transformers":
            rows.append([peer, f"{facts['max_error']:.1e} of the range", f"{100 * facts['same_best']:.0f} %", "", ""])
            continue
        error, moved = facts["max_log_probability_error"], facts["its_own_rounding"] / 2
        margins = ", ".join(three(margin) for margin in facts["our_margins_where_not"])
        same = f"{facts['same_best']} of {facts['prefixes']}"
        rounds = f"{three(moved)} nats" if name == "llama_cpp_own" else ""
        rows.append([peer, f"{three(error)} nats" if error > 0.01 else f"{error:.1e} nats", same, margins, rounds])
    header = (
        "peer",
        "largest difference",
        "same best token",
        "our margin where the tokens differ, nats",
        "its own rounding",
    )
    return markdown(header, rows) + provenance(found.values()) if rows else ""


def _question(record: Record) -> str:
    return record.what.workload.partition(": ")[0]


def _times(record: Record, exact: Record) -> str:
    found = paired.ratio(record.samples, exact.samples)
    ends = interval(f"{found.low:.2f}", f"{found.high:.2f}", len(record.samples))
    return f"{found.value:.2f}x{ends}; {keys_read(record)}"


def _by_question(records: Sequence[Record], columns: Sequence[str], cell: Callable[[Record], str], lead: str) -> str:
    """Format a table with a row per question, in the order of the records, and a column per contender."""
    rows: dict[str, dict[str, Record]] = {}
    for record in records:
        rows.setdefault(_question(record), {})[record.facts["policy"]] = record
    held = [title for title in columns if any(title in found for found in rows.values())]
    lines, used = [], []
    for question, found in rows.items():
        shown = [found[title] for title in held if title in found]
        if shown:
            lines.append([_head(question, found), *(cell(found[t]) if t in found else "" for t in held)])
            used += shown
    return markdown([lead, *held], lines) + provenance(used) if lines else ""


def _head(question: str, found: dict[str, Record]) -> str:
    """Format the row's first cell: the question, and how many of its answers dense finds.

    A remark follows if the control answers the question as well as the plan does.
    """
    dense, plan = found.get("dense"), found.get("the plan")
    if dense is not None and dense.what.op == TASK:
        outcomes = [one for document in dense.facts["found"] for one in document]
        question += f" (dense {sum(outcomes)}/{len(outcomes)})"
    return question if plan is None else question + untold(plan)


def untold(plan: Record) -> str:
    """Return a remark if the control answers the question as well as the plan does, else an empty text."""
    return UNTOLD if plan.facts.get("against_control", {}).get("says_nothing", False) else ""


def _divergence(record: Record) -> str:
    return f"{divergence(record)}; {keys_read(record)}"


def divergence(record: Record) -> str:
    """Format the mean KL per token and its interval."""
    facts = record.facts
    return three(facts["mean"]) + interval(three(facts["low"]), three(facts["high"]), len(record.samples))


def _kept(record: Record) -> str:
    p = "" if record.facts.get("kept") is None else f"; {record.facts['mcnemar_p']:.2g}"
    return f"{kept(record)}{p}; {keys_read(record)}"


def kept(record: Record) -> str:
    """Format the share of dense's right answers that a policy keeps, with a bootstrap interval over documents."""
    facts = record.facts
    if facts.get("kept") is None:
        return "dense finds none"
    ends = (f"{100 * facts[f'kept_{end}']:.0f}" for end in ("low", "high"))
    return f"{100 * facts['kept']:.0f} %" + interval(*ends, len(facts["found"]))
