"""Render the README's status of each platform, and the headline figures of docs/evidence.md."""

from collections.abc import Iterable, Sequence
from typing import Any

from lab.report import real, tables
from lab.report.markdown import keys_read, markdown, newest, provenance, ratio_of, result_of
from lab.studies import figures
from tessera.measure.evidence import OWN_MODEL, Record
from tessera.measure.judge.contenders import CONTROL, PLAN, WINDOW

NEEDLE_TOKENS, TEXT_TOKENS, PREFILL_TOKENS = (4096, 8192), (4096, 8192), 8192
"""Tokens: lengths of the documents with needles, range of positions in the text, length of the timed prompt."""
KEPT_GOAL = 0.95
"""Share of dense's needles that a plan should keep; a smaller share is printed in bold."""

Row = tuple[list[str], list[Record]]


def status(records: Sequence[Record]) -> str:
    """Render a row per platform, with one figure each. The sources of the figures are those of `summary`.

    Raises:
        ValueError: a row has no record, or a record that does not name its commit, date and command.
    """
    _, [plan, dense] = _prefill(records)
    narrow, _ = _kascade(records)
    cases, gated = _gates(records)
    chips = ", ".join(sorted(r.what.workload.rpartition(", ")[2] for r in narrow))
    provenance([plan, dense, *narrow, *gated])  # refuses a figure that nobody can repeat
    rows = [
        [
            "CPU",
            "measured",
            f"prefill of {PREFILL_TOKENS:,} tokens, SmolLM2-135M: {plan.comparison.ratio:.2f}x as fast as dense, "
            f"{keys_read(plan)} of keys read",
            "[speed](docs/speed.md), [answers](docs/answers.md)",
        ],
        [
            f"TPU ({chips})",
            "compiled; times predicted",
            f"prefill of {figures.LONG:,} tokens, the paper's recipe: {_gains(narrow)} as fast as dense, predicted",
            "[TPU](docs/tpu-figures.md)",
        ],
        [
            "Hopper",
            "compiled and simulated; never timed",
            f"machine code: {cases} cases pass every gate",
            "[Hopper](docs/gpu-figures.md)",
        ],
    ]
    return markdown(["platform", "status", "one figure", "more"], rows)


def summary(records: Sequence[Record]) -> str:
    """Render four rows: needles kept, closeness to dense, prefill time, and kernels compiled without a chip.

    Raises:
        ValueError: a row has no record.
    """
    rows, used = zip(*(draw(records) for draw in (_needles, _closeness, _prefill, _kernels)))
    header = ["what", "Kascade (95 %)", "for comparison (95 %)", "where from"]
    return markdown(header, rows) + provenance(record for own in used for record in own)


def _needles(records: Sequence[Record]) -> Row:
    """Show needles kept: at each length by the plan, and at the shortest length also by the window and the control."""
    asked = {
        (r.facts["policy"], r.facts["length"]): r
        for r in real.answered(_of_smollm2(records), real.TASK)
        if r.facts["kind"] == "single" and r.facts["length"] in NEEDLE_TOKENS
    }
    least = NEEDLE_TOKENS[0]
    names = (PLAN, CONTROL, WINDOW)
    plan, control, window = (_held(asked.get((name, least)), f"needles under {name}") for name in names)
    plans = [asked[PLAN, length] for length in NEEDLE_TOKENS if (PLAN, length) in asked]
    row = [
        f"SmolLM2-135M: needles kept, of those that dense finds{real.untold(plan)}",
        "; ".join(
            f"{r.facts['length']:,} tokens: {_bold_unless(_with_keys(real.kept(r), r), r.facts['kept'] >= KEPT_GOAL)}"
            for r in plans
        ),
        f"{least:,} tokens: "
        + "; ".join(f"{name}, {_with_keys(real.kept(r), r)}" for name, r in ((WINDOW, window), (CONTROL, control))),
        "measured, [answers](answers.md)",
    ]
    return row, [*plans, control, window]


def _closeness(records: Sequence[Record]) -> Row:
    """Compare the plan with a window of as many keys, on the domain where the plan is farthest from dense."""
    found = [
        r for r in real.answered(_of_smollm2(records), real.TEXT) if (r.facts["from"], r.facts["to"]) == TEXT_TOKENS
    ]
    plans = [r for r in found if r.facts["policy"] == PLAN]
    plan = _held(max(plans, key=lambda r: r.facts["mean"], default=None), f"text under {PLAN}")
    domain = plan.facts["domain"]
    windows = {r.facts["domain"]: r for r in found if r.facts["policy"] == WINDOW}
    window = _held(windows.get(domain), f"{domain} under {WINDOW}")
    low, high = TEXT_TOKENS
    row = [
        f"SmolLM2-135M: KL to dense per token, tokens {low:,} to {high:,}, the worst of {len(plans)} domains ({domain})"
        f"{real.untold(plan)}",
        _with_keys(f"{real.divergence(plan)} nats", plan),
        f"{WINDOW}, {_with_keys(f'{real.divergence(window)} nats', window)}",
        "measured, [answers](answers.md)",
    ]
    return row, [plan, window]


def _prefill(records: Sequence[Record]) -> Row:
    """Compare the prefill time under the plan with the dense prefill time, in the newest run on a CPU."""
    timed = [
        r
        for r in records
        if (r.suite, r.case) == (OWN_MODEL, "smollm2")
        and r.where.device == "cpu"
        and r.what.config.get("tokens") == PREFILL_TOKENS
    ]
    compared = [r for r in timed if r.comparison and not r.error]
    plan = _held(max(compared, key=lambda r: r.date, default=None), f"prefill of {PREFILL_TOKENS:,} tokens")
    versus = plan.comparison
    others = {r.key: r for r in timed if not r.error}
    dense = _held(others.get(plan.key._replace(kernel=versus.against)), f"prefill under {versus.against}")
    row = [
        f"SmolLM2-135M: prefill of {PREFILL_TOKENS:,} tokens on {plan.where.cores} CPU cores",
        _with_keys(result_of(plan), plan),
        f"{versus.against}, {result_of(dense)}: {ratio_of(plan)}",
        "measured, [speed](speed.md)",
    ]
    return row, [plan, dense]


def _kernels(records: Sequence[Record]) -> Row:
    """Show the lowest and the highest predicted gain over the TPU chips, and how many Hopper cases pass every gate."""
    shown = _kascade(records)
    chips = sorted(r.what.workload.rpartition(", ")[2] for r in shown[0])
    narrow, wide = map(_gains, shown)
    cases, gated = _gates(records)
    row = [
        f"kernels without a chip: TPU prefill of {figures.LONG:,} tokens; Hopper machine code",
        f"TPU, predicted: {narrow} as fast at the default query tile of 32, {wide} at 128 ({', '.join(chips)}); "
        f"Hopper, compiled: {cases} cases pass every gate",
        "TPU: our dense kernel on the same chip",
        "not run on a chip yet, [TPU](tpu-figures.md), [Hopper](gpu-figures.md)",
    ]
    return row, [*(record for own in shown for record in own), *gated]


def _kascade(records: Iterable[Record]) -> list[list[Record]]:
    """Return the newest predicted gains of Kascade prefill per chip, at query tiles of 32 and of 128."""
    predicted: dict[str, list[Record]] = {}
    for record in newest(r for r in records if r.what.op == "predicted figure" and r.comparison):
        predicted.setdefault(record.what.workload.rpartition(", ")[0], []).append(record)
    return [_held(predicted.get(figure), figure) for figure in (figures.KASCADE_32, figures.KASCADE)]


def _gates(records: Sequence[Record]) -> tuple[str, list[Record]]:
    """Format how many cases of the Hopper kernels pass every gate; return the records too."""
    gated = _held(tables.gated(records), "gates of the Hopper kernels")
    passed, tried, planned = map(sum, zip(*map(tables.gate_counts, gated.values())))
    cases = _bold_unless(f"{passed:,} of {max(tried, planned):,}", passed == max(tried, planned))
    return cases, [record for own in gated.values() for record in own]


def _gains(predicted: Sequence[Record]) -> str:
    """Format a figure's lowest and highest ratio over the chips; bold if a chip misses its target."""
    least, most = (pick(r.comparison.ratio for r in predicted) for pick in (min, max))
    return _bold_unless(f"{least:.2f}x to {most:.2f}x", all(r.comparison.met is not False for r in predicted))


def _of_smollm2(records: Iterable[Record]) -> list[Record]:
    """Select records of the real suites' default model. Cases with --model ran another model."""
    return [r for r in records if "--model" not in r.case]


def _with_keys(text: str, record: Record) -> str:
    return f"{text}, {keys_read(record)} of keys read"


def _bold_unless(text: str, met: bool) -> str:
    return text if met else f"**{text}**"


def _held(found: Any, what: str) -> Any:
    if not found:
        raise ValueError(f"table 'summary' has no record of {what}: first run the command that measures it")
    return found
