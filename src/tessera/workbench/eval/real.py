"""The suite that judges a plan on a real model: closeness to dense by position, and needles, against equal keys.

    tessera eval --suite real                    the short form: 2,048 and 4,096 tokens, a window as the only rival
    tessera eval --suite real-full --resume      every length, kind and rival, and the frontier; hours, goes on

All policies run the same texts and answer the same questions, so every comparison is paired; a record holds each
question's outcome. Rivals read as many keys as the plan at every position (`contenders.py`). The control is
the plan without its choice: the heads that read every key, and in the others what is read in any case, own and local
tiles and sinks. Where it does as well as the plan, a task says nothing about the choice of keys: the record says so.
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
from tessera.runtime.compilation import forget_programs
from tessera.sparse.baselines import Dense
from tessera.sparse.plan import Plan
from tessera.workbench import evidence
from tessera.workbench.eval import paired, probes, texts
from tessera.workbench.eval.closeness import BLOCK, Pass, closeness, run_text
from tessera.workbench.eval.contenders import CONTROL, PLAN, WINDOW, Contender, contenders, plan_policy, profile
from tessera.workbench.eval.trials import ROWS, run_trials
from tessera.workbench.evidence import How, Record, What

SURE = 0.05
"""Largest p at which a difference to the control is more than chance."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is asked.

    Attributes:
        lengths: ends of the ranges of positions that texts are judged in; ascending multiples of 512.
        documents: (kind, length, how many), in the order asked; lengths are multiples of 128 up to the longest.
        windows: pieces of each domain's text, of as many tokens as the longest length.
        brief: the documents that rivals but the exact choice, and all at the frontier, are asked about.
        rivals: those that run besides dense, the control and the plan; empty for all.
        shares: budgets of the frontier's rivals, as shares of the visible keys.
        scales: the plan's at the frontier, as factors of its own.
    """

    lengths: tuple[int, ...]
    documents: tuple[tuple[str, int, int], ...]
    windows: int
    brief: tuple[tuple[str, int, int], ...]
    rivals: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()


SUITES: Final[Mapping[str, Sizes]] = MappingProxyType(
    {
        "real": Sizes(
            lengths=(2048, 4096),
            documents=(
                ("single", 2048, 5),
                ("single", 4096, 2),
                ("alike", 2048, 2),
                ("values", 2048, 2),
                ("copy", 2048, 2),
            ),
            windows=1,
            brief=(("single", 2048, 5),),
            rivals=("window + sink",),
        ),
        "real-full": Sizes(
            lengths=(1024, 2048, 4096, 8192),
            documents=(
                ("single", 2048, 13),
                ("single", 4096, 13),
                *((kind, 2048, 5) for kind in ("alike", "keys", "values", "copy", "chain", "count")),
                ("single", 8192, 13),
                *((kind, 4096, 3) for kind in ("keys", "values", "copy")),
                ("single", 1024, 5),
            ),
            windows=1,
            brief=(("single", 2048, 5), ("single", 4096, 3)),
            shares=(0.1, 0.3),
            scales=(0.5, 2.0),
        ),
    }
)
"""Sizes by the suite's name."""


@dataclass(kw_only=True)
class Ledger:
    """The records of one run: what was done before is not done again.

    Attributes:
        path: where records go, one by one.
        command: repeats the run.
        dtype: the weights'.
        done: by (op, kernel, workload).
    """

    path: Path
    command: str
    dtype: str
    done: dict[tuple[str, str, str], Record] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, command: str, dtype: str, resume: bool) -> "Ledger":
        """An empty one, or, to resume, what the file holds of this command and this very commit."""
        ledger, code = cls(path=path, command=command, dtype=dtype), evidence.code()
        if resume and path.exists() and code.commit is not None and not code.dirty:
            records = [r for r in evidence.read(path) if (r.code, r.command, r.error) == (code, command, None)]
            ledger.done = {(r.what.op, r.what.kernel, r.what.workload): r for r in records}
        return ledger

    def add(self, op: str, contender: Contender, question: str, samples: Sequence[float], **rest: Any) -> Record:
        """Make a record, append it to the file, keep it."""
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
        """The record of a question, if it was asked of this very policy."""
        record = self.done.get((op, contender.name, f"{question}: {contender.title}"))
        return record if record is not None and _plain(record.what.config) == _plain(asdict(contender.policy)) else None

    def outcomes(self, question: str, name: str, title: str, documents: int) -> list[list[int]] | None:
        """What another contender found in the first documents of a question, if it was asked."""
        record = self.done.get(("eval real task", name, f"{question}: {title}"))
        return None if record is None else record.facts["found"][:documents]


@dataclass(kw_only=True)
class Material:
    """What all contenders are asked, and what dense makes of the texts, run when it is first needed.

    Attributes:
        windows: pieces of text by domain.
        filler: what facts are hidden in.
        held: `run_text` of each domain's windows under dense.
    """

    windows: Mapping[str, Sequence[np.ndarray]]
    filler: probes.Filler
    held: dict[str, list[Pass]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Model, sizes: Sizes, text: str | None) -> "Material":
        """Windows of the three domains, or of the text given instead."""
        domains = {"text": text} if text is not None else {name: get() for name, get in texts.DOMAINS.items()}
        windows = {}
        for name, body in domains.items():
            ids = np.asarray(model.tokenizer.encode(body, add_special=False, parse_special=False), np.int32)
            windows[name] = texts.windows_of(ids, sizes.windows, sizes.lengths[-1])
        return cls(windows=windows, filler=probes.Filler.of(model.tokenizer, domains.get("reference", text)))

    def dense(self, model: Model, domain: str) -> list[Pass]:
        """What dense makes of a domain's windows."""
        if domain not in self.held:
            self.held[domain] = [run_text(model, Dense(), window) for window in self.windows[domain]]
        return self.held[domain]

    def documents(self, kind: str, length: int, count: int) -> list[probes.Document]:
        """The first documents of one kind and length: the same for every contender."""
        return [probes.make_document(kind, self.filler, length, (length, index)) for index in range(count)]


# --- closeness to dense on text


def ranges(sizes: Sizes) -> list[tuple[int, int]]:
    """Ranges of positions that have a record each: up to the first length, then to each next."""
    return list(zip((0, *sizes.lengths[:-1]), sizes.lengths))


def judge_text(
    model: Model, contender: Contender, domain: str, material: Material, sizes: Sizes, ledger: Ledger
) -> list[Record]:
    """One record per range of positions: KL to dense, loss, agreement and keys read on one domain's windows."""
    blocks, counts, windows = [], [], material.windows[domain]
    for window, dense in zip(windows, material.dense(model, domain)):
        ours = dense if contender.name == "dense" else run_text(model, contender.policy, window)
        blocks.append(closeness(model, dense.hidden, ours.hidden, window))
        counts.append(ours.counts)
    blocks, counts = np.array(blocks), np.array(counts)  # [windows, blocks, 4], [windows, 2, chunks, L]
    records = []
    for low, high in ranges(sizes):
        own = blocks[:, low // BLOCK : high // BLOCK].reshape(-1, 4)
        read, visible = counts[:, :, low // ROWS : high // ROWS].sum((0, 2))
        middle = paired.mean(own[:, 0])
        question = f"{domain}, tokens {low:,} to {high:,}"
        names = ("loss_dense", "loss", "agreement")
        facts = dict(zip(names, own[:, 1:].mean(0).round(6).tolist())) | {"mean": middle.value}
        facts |= {"low": middle.low, "high": middle.high, "policy": contender.title, "domain": domain}
        facts |= {"from": low, "to": high, "windows": len(windows), "brief": contender.brief}
        control = ledger.done.get(("eval real text", "control", f"{question}: {CONTROL}"))
        if control is not None and contender.name != "control":
            better = paired.mean(np.asarray(control.samples)[: len(own)] - own[:, 0])
            facts["against_control"] = verdict(better)
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


def verdict(better: paired.Estimate, p: float = 0.0) -> dict[str, Any]:
    """What a difference to the control, positive where the policy is better, says about the choice of keys.

    Args:
        better: the difference; a few documents that agree have no interval, so that p must be small too.
        p: McNemar's, of the same difference.
    """
    nothing = better.low <= 0 or p > SURE
    return {"better_by": better.value, "low": better.low, "high": better.high, "p": p, "says_nothing": nothing}


# --- needles and their like


def judge_trials(
    model: Model, contender: Contender, documents: Sequence[probes.Document], longest: int, ledger: Ledger
) -> Record:
    """One record: which questions of one kind and length a policy answers, and what it keeps of dense's answers."""
    kind, length = documents[0].kind, documents[0].length
    answers = run_trials(model, contender.policy, documents, num_keys=longest)
    found = [[int(o.found) for o in a.outcomes] for a in answers]
    share = paired.ratio([sum(own) for own in found], [len(own) for own in found])
    question = f"{kind} at {length}"
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
    """(question, what asks it), of what is left to ask of a contender, in order."""
    longest = sizes.lengths[-1]
    for domain in material.windows:
        questions = [f"{domain}, tokens {low:,} to {high:,}" for low, high in ranges(sizes)]
        if not all(ledger.get("eval real text", contender, question) for question in questions):
            yield domain, lambda d=domain: judge_text(model, contender, d, material, sizes, ledger)
    for kind, length, count in sizes.brief if contender.brief else sizes.documents:
        question = f"{kind} at {length}"
        if not ledger.get("eval real task", contender, question):
            yield (
                question,
                lambda k=kind, n=length, c=count: [
                    judge_trials(model, contender, material.documents(k, n, c), longest, ledger)
                ],
            )


def in_order(
    model: Model, entries: Sequence[Contender], material: Material, sizes: Sizes, ledger: Ledger
) -> list[Callable[[], Sequence[Record]]]:
    """Every job: each question to dense, control, plan and window in turn, so that a run cut short has whole
    comparisons; then rival by rival."""
    in_turn = [contender for contender in entries if contender.title in ("dense", CONTROL, PLAN, WINDOW)]
    left = [[*jobs(model, contender, material, sizes, ledger)] for contender in in_turn]
    order = [*material.windows, *(f"{kind} at {length}" for kind, length, _ in sizes.documents)]
    first = [job for wanted in order for own in left for question, job in own if question == wanted]
    rest = [jobs(model, contender, material, sizes, ledger) for contender in entries if contender not in in_turn]
    return first + [job for own in rest for _, job in own]


def _plain(config: Mapping[str, Any]) -> str:
    """A policy's configuration as a record's file holds it."""
    return json.dumps(config, sort_keys=True)


def run(
    model: Model, plan: Plan | None, *, suite: str = "real", text: str | None = None, out: Path | None = None,
    resume: bool = False, command: str = "tessera eval --suite real",
) -> int:  # fmt: skip
    """Run the suite and append its records as they come; Ctrl-C loses the running job alone.

    Args:
        model: with a tokenizer and at least the shortest length of context; longer lengths are left out.
        plan: what is judged; None runs dense and the rivals.
        suite: a name of SUITES.
        text: replaces the three domains and the documents' filler.
        out: file of records; evidence/real-<device>.jsonl if None.
        resume: skip what the file holds of this command and this very commit.

    Raises:
        ValueError: no such suite, no tokenizer, or a context too short.
    """
    if suite not in SUITES:
        raise ValueError(f"{suite=} must be one of {', '.join(SUITES)}")
    if model.tokenizer is None:
        raise ValueError(f"{model.source} has no tokenizer: the suite asks in text")
    sizes = fitting(SUITES[suite], model.config.max_positions)
    out = Path("evidence") / f"real-{hardware.device_slug()}.jsonl" if out is None else Path(out)
    ledger = Ledger.open(out, command, str(model.params.embed.dtype), resume)
    material = Material.of(model, sizes, text)
    window = next(iter(material.windows.values()))[0]
    keys = () if plan is None else profile(model, plan_policy(model, plan), window)
    budgets = {"only": sizes.rivals, "shares": sizes.shares, "scales": sizes.scales}
    entries = list(contenders(model, plan, keys, sizes.lengths[-1], **budgets))
    announce(in_order(model, entries, material, sizes, ledger))
    return 0


def fitting(sizes: Sizes, context: int) -> Sizes:
    """The sizes without lengths beyond a context.

    Raises:
        ValueError: none is left.
    """
    lengths = tuple(length for length in sizes.lengths if length <= context)
    if not lengths:
        raise ValueError(f"the model's context of {context} tokens is shorter than {sizes.lengths[0]}")
    documents, brief = (tuple(one for one in own if one[1] <= context) for own in (sizes.documents, sizes.brief))
    return replace(sizes, lengths=lengths, documents=documents, brief=brief)


def announce(work: Sequence[Callable[[], Sequence[Record]]]) -> None:
    """Run jobs one by one, with a bar on standard error, and say what came of each."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        for job in bar.track(work, description="judging"):
            for record in job():
                bar.console.print(line_of(record))
            forget_programs()


def line_of(record: Record) -> str:
    """A record in words: a text's divergence, or what a policy kept of dense's answers."""
    facts = record.facts
    interval = f"({facts['low']:.3g} to {facts['high']:.3g})"
    said = f"{record.what.workload}: {facts.get('mean', record.median):.4g} {record.unit} {interval}"
    said += f", keeps {facts['kept']:.0%} of dense's {facts['of_dense']}" if facts.get("kept") is not None else ""
    return said + f", {record.mean_density:.1%} of keys"
