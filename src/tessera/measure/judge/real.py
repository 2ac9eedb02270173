"""Judge a plan on a real model, by closeness to dense and by questions, against rivals that read as many keys.

    tessera eval --suite real                    short form: up to 4,096 tokens, a window as the only rival
    tessera eval --suite real-full --resume      every length, kind and rival, also at other budgets; takes hours

All policies run the same texts and answer the same questions, so every comparison is paired; a record holds the outcome
of each question. Rivals read as many keys as the plan at every position (`contenders.py`). The control is the plan
without its choice of keys: heads that read every key under the plan still do, and the other heads read only the query
tile's own tiles, local tiles and sinks. If the control does as well as the plan on a task, the task says nothing about
the choice of keys, and the task's record says so.

The plan runs as it does for a user: tokens below its cross-over run dense, under the rivals and the control too. What
lies wholly below the cross-over is left out, because there all of them are dense.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tessera.core import hardware
from tessera.generate import Model
from tessera.measure import evidence
from tessera.measure.evidence import How, Record, What
from tessera.measure.judge import paired, probes, texts
from tessera.measure.judge.answers import run_trials
from tessera.measure.judge.closeness import BLOCK, Pass, closeness, run_text
from tessera.measure.judge.contenders import CONTROL, PLAN, WINDOW, Contender, contenders, plan_policy, profile
from tessera.runtime.compilation import forget_programs
from tessera.runtime.score import CHUNK
from tessera.sparse.baselines import Dense, first_sparse
from tessera.sparse.plan import Plan

NO_PLANS: Final[Mapping[str, Plan]] = MappingProxyType({})
SURE = 0.05
"""Largest p value (McNemar) at which a difference from the control counts as more than chance."""
RESOLUTION = 1e-6
"""KL differences of at most this many nats are rounding errors: records round to 1e-7, and programs may sum in
different orders."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Amount of work in a suite.

    Attributes:
        lengths: ends of the position ranges that get a record each; ascending multiples of 512.
        documents: (kind, length, count), in the order they run; lengths are multiples of 128, at most the last of
            `lengths`.
        windows: number of text windows per domain, each as long as the longest length.
        brief: `documents` for contenders whose `brief` is set. These are most rivals, other plans, and all contenders
            that run at a budget other than the plan's (the frontier).
        start: first position that is judged; a multiple of 512.
        rivals: names of rivals that run in addition to dense, the control and the plan; empty for all.
        shares: budgets of the frontier's rivals, as shares of the visible keys.
        scales: budgets of the frontier's plans, as multiples of the plan's own budget.
    """

    lengths: tuple[int, ...]
    documents: tuple[tuple[str, int, int], ...]
    windows: int
    brief: tuple[tuple[str, int, int], ...]
    start: int = 0
    rivals: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()

    def name(self, question: str) -> str:
        """Return a question's name in records: with a cross-over it is another question, which replaces none."""
        return f"{question}, dense before {self.start:,}" if self.start else question


SUITES: Final[Mapping[str, Sizes]] = MappingProxyType(
    {
        "real": Sizes(
            lengths=(2048, 4096),
            documents=(
                ("single", 2048, 2),
                ("single", 4096, 3),
                *((kind, 4096, 1) for kind in ("alike", "values", "copy")),
            ),
            windows=1,
            brief=(("single", 4096, 2),),
            rivals=("window + sink",),
        ),
        "real-full": Sizes(
            lengths=(1024, 2048, 4096, 8192),
            documents=(
                ("single", 4096, 13),
                ("single", 8192, 5),
                *((kind, 4096, 3) for kind in ("alike", "keys", "values", "copy", "chain", "count")),
                ("single", 2048, 13),
                ("single", 1024, 5),
            ),
            windows=1,
            brief=(("single", 4096, 5), ("single", 8192, 2)),
            shares=(0.1, 0.3),
            scales=(0.5, 2.0),
        ),
    }
)
"""Sizes by suite name."""


@dataclass(kw_only=True)
class Ledger:
    """Records of one run, from which a resumed run learns what is done.

    Attributes:
        path: file that records are appended to, one by one.
        command: command line that repeats the run.
        dtype: dtype of the weights.
        done: finished records by (op, kernel, workload).
    """

    path: Path
    command: str
    dtype: str
    done: dict[tuple[str, str, str], Record] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, command: str, dtype: str, resume: bool) -> "Ledger":
        """Open an empty ledger or, to resume, one with the file's records of this command and commit."""
        ledger, code = cls(path=path, command=command, dtype=dtype), evidence.code()
        if resume and path.exists() and code.commit is not None and not code.dirty:
            records = [r for r in evidence.read(path) if (r.code, r.command, r.error) == (code, command, None)]
            ledger.done = {(r.what.op, r.what.kernel, r.what.workload): r for r in records}
        return ledger

    def add(self, op: str, contender: Contender, question: str, samples: Sequence[float], **rest: Any) -> Record:
        """Build a record, append it to the file and keep it in `done`."""
        policy = contender.policy
        what = What(
            op=op,
            kernel=contender.name,
            workload=f"{question}: {contender.title}",
            dtype=self.dtype,
            config=asdict(policy),
            title=f"{question}, {contender.title}",
        )
        record = evidence.make(what, samples, command=self.command, **rest)
        evidence.append(self.path, record)
        self.done[op, contender.name, what.workload] = record
        return record

    def get(self, op: str, contender: Contender, question: str) -> Record | None:
        """Return the contender's record on a question; None if there is none or its policy had other settings."""
        record = self.done.get((op, contender.name, f"{question}: {contender.title}"))
        if record is None or _plain(record.what.config) != _plain(asdict(contender.policy)):
            return None
        return record

    def outcomes(self, question: str, name: str, title: str, documents: int) -> list[list[int]] | None:
        """Return the named contender's outcomes, 1 or 0 per document and question; None if it has no record."""
        record = self.done.get(("eval real task", name, f"{question}: {title}"))
        return None if record is None else record.facts["found"][:documents]


@dataclass(kw_only=True)
class Material:
    """Texts and documents for all contenders, and the texts' results under dense, computed on first use.

    Attributes:
        windows: windows of token ids by domain.
        filler: text that facts are hidden in.
        held: results of `run_text` under dense for each domain's windows, by domain.
    """

    windows: Mapping[str, Sequence[np.ndarray]]
    filler: probes.Filler
    held: dict[str, list[Pass]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Model, sizes: Sizes, text: str | None) -> "Material":
        """Cut windows from the three domains of `texts`, or from `text` if it is given."""
        domains = {"text": text} if text is not None else {name: get() for name, get in texts.DOMAINS.items()}
        windows = {}
        for name, body in domains.items():
            ids = np.asarray(model.tokenizer.encode(body, add_special=False, parse_special=False), np.int32)
            windows[name] = texts.windows_of(ids, sizes.windows, sizes.lengths[-1])
        return cls(windows=windows, filler=probes.Filler.of(model.tokenizer, domains.get("reference", text)))

    def dense(self, model: Model, domain: str) -> list[Pass]:
        """Run a domain's windows under dense, or return the results of an earlier call."""
        if domain not in self.held:
            self.held[domain] = [run_text(model, Dense(), window) for window in self.windows[domain]]
        return self.held[domain]

    def documents(self, kind: str, length: int, count: int) -> list[probes.Document]:
        """Build the first `count` documents of one kind and length, the same for every contender."""
        return [probes.make_document(kind, self.filler, length, (length, index)) for index in range(count)]


# --- closeness to dense on text


def ranges(sizes: Sizes) -> list[tuple[int, int]]:
    """Return the position ranges that get a record each: to the first length, then from each length to the next."""
    return list(zip((sizes.start, *sizes.lengths[:-1]), sizes.lengths))


def judge_text(
    model: Model, contender: Contender, domain: str, material: Material, sizes: Sizes, ledger: Ledger
) -> list[Record]:
    """Record KL to dense, loss, agreement and keys read on one domain's windows, once per range of positions."""
    blocks, counts, windows = [], [], material.windows[domain]
    for window, dense in zip(windows, material.dense(model, domain)):
        ours = dense if contender.name == "dense" else run_text(model, contender.policy, window)
        blocks.append(closeness(model, dense.hidden, ours.hidden, window))
        counts.append(ours.counts)
    blocks, counts = np.array(blocks), np.array(counts)  # [windows, blocks, 4], [windows, 2, chunks, L]
    records = []
    for low, high in ranges(sizes):
        own = blocks[:, low // BLOCK : high // BLOCK].reshape(-1, 4)
        read, visible = counts[:, :, low // CHUNK : high // CHUNK].sum((0, 2))
        middle = paired.mean(own[:, 0])
        question = sizes.name(f"{domain}, tokens {low:,} to {high:,}")
        names = ("loss_dense", "loss", "agreement")
        facts = dict(zip(names, own[:, 1:].mean(0).round(6).tolist())) | {"mean": middle.value}
        facts |= {"low": middle.low, "high": middle.high, "policy": contender.title, "domain": domain}
        facts |= {"from": low, "to": high, "windows": len(windows), "brief": contender.brief}
        control = ledger.done.get(("eval real text", "control", f"{question}: {CONTROL}"))
        if control is not None and contender.name != "control":
            better = paired.mean(np.asarray(control.samples)[: len(own)] - own[:, 0])
            facts["against_control"] = verdict(better, resolution=RESOLUTION)
        records.append(
            ledger.add(
                "eval real text",
                contender,
                question,
                own[:, 0].round(7).tolist(),
                unit="nats",
                density=tuple((read / visible).round(5).tolist()),
                facts=facts,
                how=How(iterations=len(own), check=f"KL(dense || policy), mean of every {BLOCK} tokens"),
            )
        )
    return records


def verdict(better: paired.Estimate, p: float = 0.0, resolution: float = 0.0) -> dict[str, Any]:
    """Decide whether a difference from the control says anything about the choice of keys.

    Args:
        better: the difference, positive if the policy is better. Its interval is not enough: the interval has no
            width if all documents have the same difference, however few they are. So `p` is judged, too.
        p: McNemar's p of the same difference; 0 where the test does not apply.
        resolution: largest difference that is only rounding.
    """
    nothing = better.low <= resolution or p > SURE
    return {"better_by": better.value, "low": better.low, "high": better.high, "p": p, "says_nothing": nothing}


# --- answers to questions about documents


def judge_trials(
    model: Model, contender: Contender, documents: Sequence[probes.Document], sizes: Sizes, ledger: Ledger
) -> Record:
    """Record which questions of one kind and length a policy answers right, and its share of dense's right answers."""
    kind, length = documents[0].kind, documents[0].length
    answers = run_trials(model, contender.policy, documents, num_keys=sizes.lengths[-1])
    found = [[int(o.found) for o in a.outcomes] for a in answers]
    share = paired.ratio([sum(own) for own in found], [len(own) for own in found])
    question = sizes.name(f"{kind} at {length}")
    facts: dict[str, Any] = {"kind": kind, "length": length, "policy": contender.title, "found": found}
    facts |= {"logprob": [[round(o.logprob, 3) for o in a.outcomes] for a in answers], "brief": contender.brief}
    facts |= {"depths": [[round(q.depth, 3) for q in d.questions] for d in documents]}
    facts |= {"low": share.low, "high": share.high}
    dense, control = (ledger.outcomes(question, *who, len(found)) for who in (("dense", "dense"), ("control", CONTROL)))
    dense = found if contender.name == "dense" else dense
    if dense is not None:
        lost, gained = paired.discordant(dense, found)
        kept = paired.kept(dense, found)
        facts |= {"of_dense": sum(map(sum, dense)), "lost": lost, "gained": gained}
        facts |= {"mcnemar_p": paired.mcnemar(lost, gained), "kept_low": kept.low, "kept_high": kept.high}
        facts |= {"kept": None if np.isnan(kept.value) else kept.value}
    if control is not None and contender.name != "control":
        p = paired.mcnemar(*paired.discordant(control, found))
        facts["against_control"] = verdict(paired.gain(control, found), p)
    return ledger.add(
        "eval real task",
        contender,
        question,
        [share.value],
        unit="fraction",
        density=tuple(np.mean([a.density for a in answers], axis=0).round(5).tolist()),
        facts=facts,
        how=How(iterations=sum(map(len, found)), check="every token of the answer is the best guess"),
    )


# --- the suite


def jobs(
    model: Model, contender: Contender, material: Material, sizes: Sizes, ledger: Ledger
) -> Iterator[tuple[str, Callable[[], Sequence[Record]]]]:
    """Yield (question, job that makes its records) for every question that the contender still has to answer."""
    for domain in material.windows:
        questions = [sizes.name(f"{domain}, tokens {low:,} to {high:,}") for low, high in ranges(sizes)]
        if not all(ledger.get("eval real text", contender, question) for question in questions):
            yield domain, lambda d=domain: judge_text(model, contender, d, material, sizes, ledger)
    for kind, length, count in sizes.brief if contender.brief else sizes.documents:
        question = f"{kind} at {length}"
        if not ledger.get("eval real task", contender, sizes.name(question)):
            yield (
                question,
                lambda k=kind, n=length, c=count: [
                    judge_trials(model, contender, material.documents(k, n, c), sizes, ledger)
                ],
            )


def in_order(
    model: Model, entries: Sequence[Contender], material: Material, sizes: Sizes, ledger: Ledger
) -> list[Callable[[], Sequence[Record]]]:
    """Return every job: first each question under dense, control, plan and window, so that an interrupted run holds
    complete comparisons; then the other contenders one by one."""
    in_turn = [contender for contender in entries if contender.title in ("dense", CONTROL, PLAN, WINDOW)]
    left = [[*jobs(model, contender, material, sizes, ledger)] for contender in in_turn]
    order = [*material.windows, *(f"{kind} at {length}" for kind, length, _ in sizes.documents)]
    first = [job for wanted in order for own in left for question, job in own if question == wanted]
    rest = [jobs(model, contender, material, sizes, ledger) for contender in entries if contender not in in_turn]
    return first + [job for own in rest for _, job in own]


def _plain(config: Mapping[str, Any]) -> str:
    """Encode a policy's configuration as JSON, so that a tuple compares equal to the list read back from a file."""
    return json.dumps(config, sort_keys=True)


def run(
    model: Model, plan: Plan | None, *, suite: str = "real", text: str | None = None, out: Path | None = None,
    resume: bool = False, command: str = "tessera eval --suite real", others: Mapping[str, Plan] = NO_PLANS,
) -> int:  # fmt: skip
    """Run the suite and append each record as soon as it is made; Ctrl-C loses only the running job.

    Args:
        model: the model; needs a tokenizer, and a context of at least the suite's shortest length. Lengths beyond the
            context are skipped.
        plan: the plan to judge; if None, only dense and the rivals run.
        suite: a name of SUITES.
        text: text to use instead of the three domains and the documents' filler.
        out: file of records; evidence/real-<device>.jsonl if None.
        resume: skip what this command has already recorded in the file at this commit.
        others: other plans of the model by name, with which to compare the plan.

    Raises:
        ValueError: the suite is unknown, the model has no tokenizer, its context is too short, or the plan's cross-over
            leaves no length on which the plan is not dense.
    """
    if suite not in SUITES:
        raise ValueError(f"{suite=} must be one of {', '.join(SUITES)}")
    if model.tokenizer is None:
        raise ValueError(f"{model.source} has no tokenizer, but the questions are text: pass a model with a tokenizer")
    sizes = fitting(SUITES[suite], model.config.max_positions, 0 if plan is None else plan.crossover_tokens)
    out = Path("evidence") / f"real-{hardware.device_slug()}.jsonl" if out is None else Path(out)
    ledger = Ledger.open(out, command, model.precision, resume)
    material = Material.of(model, sizes, text)
    window = next(iter(material.windows.values()))[0]
    keys = () if plan is None else profile(model, plan_policy(model, plan), window, sizes.start)
    budgets = {"only": sizes.rivals, "shares": sizes.shares, "scales": sizes.scales, "others": others}
    entries = list(contenders(model, plan, keys, sizes.lengths[-1], **budgets))
    announce(in_order(model, entries, material, sizes, ledger))
    return 0


def fitting(sizes: Sizes, context: int, crossover: int) -> Sizes:
    """Return the sizes without the lengths that exceed the context, or at which everything runs dense.

    Raises:
        ValueError: no length is left.
    """
    if sizes.lengths[0] > context:
        raise ValueError(f"the model's context of {context} tokens is too short: {sizes.lengths[0]} are needed")
    start, longest = first_sparse(crossover, CHUNK), max(length for length in sizes.lengths if length <= context)
    if start >= longest:
        raise ValueError(
            f"the plan's crossover_tokens={crossover} leaves nothing to judge: up to {longest} tokens the plan runs "
            f'dense here. To judge its choice of keys, pass a copy of the plan with "crossover_tokens": 0 and '
            '"decode_crossover": null'
        )
    lengths = tuple(length for length in sizes.lengths if start < length <= context)
    documents, brief = (tuple(one for one in own if one[1] in lengths) for own in (sizes.documents, sizes.brief))
    return replace(sizes, lengths=lengths, documents=documents, brief=brief, start=start)


def announce(work: Sequence[Callable[[], Sequence[Record]]]) -> None:
    """Run jobs one by one, with a progress bar on standard error, and print each result."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        for job in bar.track(work, description="judging"):
            for record in job():
                bar.console.print(line_of(record))
            forget_programs()


def line_of(record: Record) -> str:
    """Describe a record in words: a text's divergence, or how many of dense's answers a policy kept."""
    facts = record.facts
    interval = f"({facts['low']:.3g} to {facts['high']:.3g})"
    said = f"{record.what.workload}: {facts.get('mean', record.median):.4g} {record.unit} {interval}"
    if facts.get("kept") is not None:
        said += f", keeps {facts['kept']:.0%} of dense's {facts['of_dense']} right answers"
    return said + f", {record.mean_density:.1%} of keys"
