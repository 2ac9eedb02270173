"""Tables and notes that `tessera fit` prints without --json."""

from rich import box
from rich.console import Console
from rich.table import Table

from tessera.models.weights import num_parameters
from tessera.runtime.planner import Answer, Pair
from tessera.runtime.roofline import DERIVED, HEAD_DIM, Speed

GIB = 1 << 30
WORDS = ("weights, cache", "reads", "bound by")
"""Left-aligned columns; all other columns are right-aligned."""


def print_answer(answer: Answer, model: str, checks=()) -> None:
    """Print tables of memory and times, notes, and a line for each of `checks` (`plan_check.Check`)."""
    console, q = Console(), answer.question
    parameters = num_parameters(q.config) / 1e9
    console.print(
        f"{model}, {parameters:.2f}B parameters, on {q.devices} x {q.chip} (mesh {answer.division}: heads x context); "
        f"{q.batch} x {q.length:,} tokens, prefill in chunks of {q.chunk:,} rows",
        highlight=False,
        markup=False,
    )
    _print_whole(console, _memory(answer))
    if answer.choice is not None:
        _print_whole(console, _times(answer))
    for line in _notes(answer):
        console.print(line, highlight=False, markup=False)
    for check in checks:
        console.print(check.line(), highlight=False, markup=False)


def _name(pair: Pair) -> str:
    return f"{pair.weights}, {pair.cache}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name in WORDS else "right", no_wrap=True)
    return table


def _print_whole(console: Console, table: Table) -> None:
    """Print a table at its full width, so that a narrow terminal wraps the lines; rich would cut off figures."""
    table.width = table.__rich_measure__(console, console.options.update(max_width=1000)).maximum
    console.print(table, crop=False)


def _memory(answer: Answer) -> Table:
    title = (
        f"GiB per device, {answer.pairs[0].usable_bytes / GIB:.1f} usable; longest context and largest batch that fit"
    )
    table = _table(title, "weights, cache", "fits", "total", "weights", "cache", "rest", "longest", "batch")
    for pair in answer.pairs:
        parts = pair.parts
        sizes = parts.total, parts.weights, parts.cache, parts.total - parts.weights - parts.cache
        verdict = "yes" if pair.fits else "no"
        sizes = (f"{size / GIB:.3g}" for size in sizes)
        table.add_row(_name(pair), verdict, *sizes, f"{pair.longest:,}", f"{pair.largest:,}")
    return table


def _times(answer: Answer) -> Table:
    columns = "first", "bound by", "decode", "bound by", "tokens/s"
    table = _table(
        "Predicted seconds to the first token, and milliseconds per token", "weights, cache", "reads", *columns
    )
    for pair in answer.pairs:
        if pair.fits:
            table.add_row(_name(pair), "dense", *_speed(pair.dense))
            table.add_row("", "kascade", *_speed(pair.kascade))
    return table


def _speed(speed: Speed) -> tuple[str, ...]:
    first, decode = f"{speed.prefill_s:.3g}", f"{speed.decode_ms:.3g}"
    return first, speed.prefill_bound, decode, speed.decode_bound, f"{speed.tokens_per_s:,.0f}"


def _notes(answer: Answer) -> list[str]:
    q, lines = answer.question, []
    if answer.choice is None:
        too_large = [f" {_name(pair)}: {pair.why_not}." for pair in answer.pairs if not pair.refused]
        lines.append("Nothing fits." + "".join(too_large[-1:]))  # the narrowest types come last
    else:
        lines.append(f"First choice: weights, cache = {_name(answer.choice)}, the widest types that fit.")
    lines += _refusals(answer)
    if answer.choice is not None and q.chip in DERIVED and q.config.head_dim != HEAD_DIM:
        doubt = "takes longer than predicted" if q.config.head_dim < HEAD_DIM else "may differ from the prediction"
        lines.append(
            f"The prediction assumes that attention reaches the same share of the peak rate as with heads of "
            f"{HEAD_DIM} elements; with {q.config.head_dim}, prefill {doubt}."
        )
    if q.length > q.config.max_positions:
        lines.append(f"The model's context is {q.config.max_positions:,} tokens, less than the planned {q.length:,}.")
    if answer.division.context > 1 and answer.division.heads == 1:
        lines.append("The mesh does not split heads, so each device holds all weights.")
    if answer.sharing is not None:
        how = answer.sharing.explain(min(q.chunk, q.length))
        lines.append(f"{how[0].upper()}{how[1:]}. The times assume that chunks are shared by heads.")
    return lines


def _refusals(answer: Answer) -> list[str]:
    """Return a line for each reason, other than memory, for which pairs of weight and cache types are refused."""
    found: dict[str, list[Pair]] = {}
    for pair in answer.pairs:
        if pair.refused:
            found.setdefault(pair.refused, []).append(pair)
    lines = []
    for reason, pairs in found.items():  # a reason holds for every one of these weights with every one of these caches
        weights, caches = (", ".join(dict.fromkeys(getattr(p, name) for p in pairs)) for name in ("weights", "cache"))
        lines.append(f"Refused: weights {weights} with cache {caches}: {reason}.")
    return lines
