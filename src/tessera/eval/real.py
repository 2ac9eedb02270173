"""The suite that judges a plan on a real model: closeness to dense by position, and needles, against equal keys.

    tessera eval --suite real                    the short form: 2,048 and 4,096 tokens, the rivals that matter most
    tessera eval --suite real-full --resume      every length, kind and rival, and the frontier; hours, goes on

All policies run the same texts and answer the same questions, so every comparison is paired; a record holds each
question's outcome. Rivals read as many keys as the plan at every position (`tessera.eval.contenders`). The control
keeps the plan's dense layers and has all others read what the plan reads without choosing: own tiles, and local tiles
and sinks if it has any. Where it does as well as the plan, a task says nothing about the choice of keys, and the record
says so.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from tessera import evidence
from tessera.eval import paired, probes, texts
from tessera.eval.contenders import CONTROL, Contender, contenders, plan_policy, profile
from tessera.eval.trials import ROWS, Runner, run_trials
from tessera.evidence import How, Record, What
from tessera.generate import Model
from tessera.models.decoder import logits
from tessera.sparse.baselines import Dense
from tessera.sparse.contract import Policy
from tessera.sparse.plan import Plan

BLOCK = 256
"""Tokens of a text whose divergence is one sample: neighbours share their context, so an interval redraws blocks."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is asked.

    Attributes:
        lengths: tokens of document, question and answer; ascending multiples of 512.
        documents: how many per kind and length; the first kind's are asked at every length, the others' at `others`.
        others: lengths at which the other kinds are asked.
        windows: pieces of each domain's text, of as many tokens as the longest length.
        rivals: titles of those that run besides dense, the control and the plan; empty for all.
        shares: budgets of the frontier, as shares of the visible keys; the plan's own budgets are scaled by `scales`.
        scales: factors of the plan's fraction and minimum.
    """

    lengths: tuple[int, ...]
    documents: Mapping[str, int]
    others: tuple[int, ...]
    windows: int
    rivals: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()


SUITES: Final[Mapping[str, Sizes]] = MappingProxyType(
    {
        "real": Sizes(
            lengths=(2048, 4096),
            documents={"single": 4, "keys": 3, "values": 3, "chain": 4, "copy": 3, "count": 4},
            others=(2048,),
            windows=1,
            rivals=("window + sink", "own choice, tile 16"),
        ),
        "real-full": Sizes(
            lengths=(1024, 2048, 4096, 8192),
            documents={"single": 13, "keys": 8, "values": 7, "chain": 10, "copy": 7, "count": 10},
            others=(1024, 2048, 4096, 8192),
            windows=3,
            shares=(0.1, 0.2, 0.3, 0.4),
            scales=(0.5, 1.5, 2.0),
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
        done: by (op, kernel, workload).
    """

    path: Path
    command: str
    done: dict[tuple[str, str, str], Record] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, command: str, resume: bool) -> "Ledger":
        """An empty one, or, to resume, what the file holds of this command and this very commit."""
        ledger, code = cls(path=path, command=command), evidence.code()
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
            dtype="float32",
            config=asdict(policy),
            title=f"{question}, {contender.title}",
        )
        record = evidence.make(what, samples, command=self.command, **rest)
        evidence.append(self.path, record)
        self.done[op, contender.name, what.workload] = record
        return record

    def get(self, op: str, contender: Contender, question: str) -> Record | None:
        """The record of a question, if it was asked."""
        return self.done.get((op, contender.name, f"{question}: {contender.title}"))


# --- closeness to dense on text


@jax.jit
def compare_rows(params, dense, ours, targets):
    """KL(dense || ours), both losses and equal best guesses of rows: [4, rows]."""
    pair = [jax.nn.log_softmax(logits(params, x).astype(jnp.float32)) for x in (dense, ours)]
    kl = jnp.sum(jnp.exp(pair[0]) * (pair[0] - pair[1]), -1)
    losses = [-jnp.take_along_axis(x, targets[:, None], -1)[:, 0] for x in pair]
    return jnp.stack([kl, *losses, (pair[0].argmax(-1) == pair[1].argmax(-1)).astype(jnp.float32)])


def hidden_of(model: Model, policy: Policy, window: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The last layer's output on a text, [tokens, D], and the keys read and visible per ROWS tokens, [2, chunks, L]."""
    runner = Runner(model, policy, len(window))
    hidden = np.concatenate([np.asarray(part) for _, part in runner.fill(window)])
    counts = np.stack([[np.asarray(reads[i], float)[:, 0] for reads in runner.pending] for i in (0, 1)])
    return hidden[: len(window)], counts


def closeness(model: Model, dense: np.ndarray, ours: np.ndarray, window: np.ndarray) -> np.ndarray:
    """Means of KL, dense's loss, ours and equal best guesses per BLOCK tokens, [blocks, 4]; the last predicts none."""
    targets, blocks = np.append(window[1:], 0), []
    for start in range(0, len(window), BLOCK):
        part = slice(start, start + BLOCK)
        rows = np.asarray(compare_rows(model.params, dense[part], ours[part], targets[part]), float)
        blocks.append(rows[:, : len(window) - 1 - start].mean(1))
    return np.array(blocks)


def ranges(sizes: Sizes) -> list[tuple[int, int]]:
    """Ranges of positions that are judged apart: up to the first length, then to each next."""
    return list(zip((0, *sizes.lengths[:-1]), sizes.lengths))


def judge_text(
    model: Model, contender: Contender, domain: str, windows: Sequence[np.ndarray], dense: Sequence[np.ndarray],
    sizes: Sizes, ledger: Ledger,
) -> list[Record]:  # fmt: skip
    """One record per range of positions: KL to dense, loss, agreement and keys read on one domain's windows."""
    blocks, counts = [], []
    for window, reference in zip(windows, dense, strict=True):
        ours, count = hidden_of(model, contender.policy, window)
        blocks.append(closeness(model, reference, ours, window))
        counts.append(count)
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
        facts |= {"from": low, "to": high, "windows": len(windows), "frontier": contender.frontier}
        control = ledger.done.get(("eval real text", "control", f"{question}: {CONTROL}"))
        if control is not None and contender.name != "control":
            better = paired.mean(np.asarray(control.samples) - own[:, 0])
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


def verdict(better: paired.Estimate) -> dict[str, Any]:
    """What a difference to the control, positive where the policy is better, says about the choice of keys."""
    return {"better_by": better.value, "low": better.low, "high": better.high, "says_nothing": better.low <= 0}


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
    facts |= {"logprob": [[round(o.logprob, 3) for o in a.outcomes] for a in answers], "frontier": contender.frontier}
    facts |= {"depths": [[round(q.depth, 3) for q in d.questions] for d in documents]}
    facts |= {"low": share.low, "high": share.high}
    dense = ledger.done.get(("eval real task", "dense", f"{question}: dense"))
    if dense is not None:
        lost, gained = paired.discordant(dense.facts["found"], found)
        kept = paired.kept(dense.facts["found"], found)
        facts |= {"of_dense": sum(map(sum, dense.facts["found"])), "lost": lost, "gained": gained}
        facts |= {"mcnemar_p": paired.mcnemar(lost, gained), "kept_low": kept.low, "kept_high": kept.high}
        facts |= {"kept": None if np.isnan(kept.value) else kept.value}
    control = ledger.done.get(("eval real task", "control", f"{question}: {CONTROL}"))
    if control is not None and contender.name != "control":
        facts["against_control"] = verdict(paired.gain(control.facts["found"], found))
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


@dataclass(frozen=True, kw_only=True)
class Material:
    """What all contenders are asked, and dense's hidden states on the texts."""

    windows: Mapping[str, Sequence[np.ndarray]]
    dense: Mapping[str, Sequence[np.ndarray]]
    filler: probes.Filler

    def documents(self, kind: str, length: int, sizes: Sizes) -> list[probes.Document]:
        """The documents of one kind and length: the same for every contender."""
        return [probes.make_document(kind, self.filler, length, (length, i)) for i in range(sizes.documents[kind])]


def prepare(model: Model, sizes: Sizes, text: str | None) -> Material:
    """Cut the texts into windows and run them dense; the text given, if any, replaces the three domains."""
    domains = {"text": text} if text is not None else {name: get() for name, get in texts.DOMAINS.items()}
    longest, windows, dense = sizes.lengths[-1], {}, {}
    for name, body in domains.items():
        ids = np.asarray(model.tokenizer.encode(body, add_special=False, parse_special=False), np.int32)
        windows[name] = texts.windows_of(ids, sizes.windows, longest)
        dense[name] = [hidden_of(model, Dense(), window)[0] for window in windows[name]]
    filler = probes.Filler.of(model.tokenizer, domains.get("reference", text))
    return Material(windows=windows, dense=dense, filler=filler)


def jobs(model: Model, contender: Contender, material: Material, sizes: Sizes, ledger: Ledger) -> Iterator[Callable]:
    """What is left to ask of a contender, in order."""
    longest = sizes.lengths[-1]
    for domain, windows in material.windows.items():
        questions = [f"{domain}, tokens {low:,} to {high:,}" for low, high in ranges(sizes)]
        if not all(ledger.get("eval real text", contender, question) for question in questions):
            yield lambda d=domain, w=windows: judge_text(model, contender, d, w, material.dense[d], sizes, ledger)
    for kind in sizes.documents:
        first = kind == next(iter(sizes.documents))
        for length in sizes.lengths:
            wanted = first or (length in sizes.others and not contender.frontier)
            if wanted and not ledger.get("eval real task", contender, f"{kind} at {length}"):
                asked = material.documents(kind, length, sizes)
                yield lambda a=asked: [judge_trials(model, contender, a, longest, ledger)]


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
    out = Path("evidence") / f"real-{evidence.device_slug()}.jsonl" if out is None else Path(out)
    ledger, material = Ledger.open(out, command, resume), prepare(model, sizes, text)
    found = None
    if plan is not None:
        longest = next(iter(material.windows.values()))[0]
        found = profile(model, plan_policy(model, plan), longest)
    announce = Announcer()
    budgets = {"only": sizes.rivals, "shares": sizes.shares, "scales": sizes.scales}
    for contender in contenders(model, plan, found, sizes.lengths[-1], **budgets):
        for job in jobs(model, contender, material, sizes, ledger):
            announce(job)
    return 0


def fitting(sizes: Sizes, context: int) -> Sizes:
    """The sizes without lengths beyond a context.

    Raises:
        ValueError: none is left.
    """
    lengths = tuple(length for length in sizes.lengths if length <= context)
    if not lengths:
        raise ValueError(f"the model's context of {context} tokens is shorter than {sizes.lengths[0]}")
    return replace(sizes, lengths=lengths, others=tuple(n for n in sizes.others if n <= context))


class Announcer:
    """Runs a job and says on standard error what came of it."""

    def __init__(self):
        from rich.console import Console

        self.console = Console(stderr=True, highlight=False)

    def __call__(self, job: Callable[[], Sequence[Record]]) -> None:
        from time import perf_counter

        started_s = perf_counter()
        with self.console.status("running"):
            records = job()
        for record in records:
            facts, density = record.facts, record.mean_density
            shown = facts.get("kept") if record.unit == "fraction" else None
            value = facts["mean"] if shown is None and "mean" in facts else record.median
            line = f"{record.what.workload}: {value:.4g} {record.unit} ({facts['low']:.3g} to {facts['high']:.3g})"
            line += "" if shown is None else f", keeps {shown:.0%} of dense's {facts['of_dense']}"
            self.console.print(line + ("" if density is None else f", {density:.1%} of keys"))
        self.console.print(f"    {perf_counter() - started_s:.0f} s")
