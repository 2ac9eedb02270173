"""`python -m lab study fuzz`: damage every kind of model file, open the model, and judge the outcome.

A tiny model is written as a folder, as a folder of shards and as a GGUF file. Each case damages one of these files
(`mutations`), and a worker process with limits on time and memory loads the model and runs it on three tokens. The
outcome is "clean" (the model loads and makes sense, or the error is one readable sentence), or a defect:

- unclean: another error, or a sentence that is too long, has control characters or does not name the file,
- nonsense: the model loads although a value is outside its domain (`domains`), scores are not finite, or the outcome
  differs from the undamaged model's although nothing that decides the outcome was damaged,
- hang, crash: the worker had to be killed, or died.
"""

import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lab.studies.domains import nonsense
from lab.studies.mutations import (
    ARRAY,
    BOOL,
    FLOAT32,
    INT32,
    STRING,
    UINT32,
    Gguf,
    mutate_bytes,
    mutate_gguf,
    mutate_json,
    mutate_safetensors,
)
from tessera.core.child import Ended, Worker
from tessera.core.files import Notebook, sources
from tessera.models.config import ModelConfig
from tessera.models.files.checkpoint import fingerprint, save_folder
from tessera.models.layers import Params
from tessera.models.text.tokenizer import byte_tokenizer
from tessera.models.weights import LAYER, OUTER, init_params
from tessera.sparse.plan import Plan

CONFIG = ModelConfig(
    vocab_size=264,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
    max_positions=64,
    tie_embeddings=True,
    bos_id=256,
    eos_ids=(257,),
)
BLOCK = 50
"""Cases per line of the file of results."""
BYTES_SHARE = 0.25
"""Share of JSON cases that damage the file's bytes instead of its values."""
LONGEST = 500
"""Maximum characters of a message: a longer error message is unclean, and other messages are cut."""
WALL_S = 120.0
"""Maximum seconds of wall time per case. This exceeds the limit on processor time, since the machine may be busy."""
READY_S = 900.0
GGUF = "model.gguf"
TARGETS = {
    "config.json": 6,
    "generation_config.json": 2,
    "model.safetensors": 5,
    "model.safetensors.index.json": 2,
    "tokenizer.json": 4,
    "tokenizer_config.json": 3,
    GGUF: 5,
    "plan.json": 4,
}
"""File -> weight in the random choice of the file to damage."""
DEFECTS = ("unclean", "nonsense", "hang", "crash")
INERT_CONFIG = {"bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "max_position_embeddings"}
"""Fields of config.json that do not decide the scores."""


@dataclass(frozen=True)
class Case:
    """One damaged file: its number, name and content."""

    number: int
    name: str
    data: bytes


class Bench:
    """The undamaged models in a scratch folder, the worker that opens models, and its replies for the undamaged ones
    (`expected`)."""

    def __init__(self, limit_s: float, niceness: int = 0):
        self.root = Path(tempfile.mkdtemp(prefix="tessera-fuzz-"))
        self.limit_s, self.gguf = limit_s, write_models(self.root)
        self.sound = {name: self.place(name).read_bytes() for name in TARGETS}
        module = "lab.studies.fuzz_worker"
        folders = [self.root / "whole" / "model", self.root / "planned" / "model", self.root / "gguf" / GGUF]
        command = [sys.executable, "-m", module, *map(str, folders)]
        self.worker = Worker(command, niceness=niceness, ready_s=READY_S)
        self.expected = {}
        for name in TARGETS:
            self.expected[name] = self.open(name)
            if self.expected[name]["outcome"] != "loaded":
                raise RuntimeError(f"the undamaged model with {name} does not load: {self.expected[name]}")

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *exc: object) -> None:
        self.worker.__exit__(*exc)
        shutil.rmtree(self.root)

    def place(self, name: str) -> Path:
        """Return the path of a file, in the folder of the model that reads files of this name."""
        kinds = {GGUF: "gguf", "plan.json": "planned", "model.safetensors.index.json": "shards"}
        return self.root / kinds.get(name, "whole") / ("" if name == GGUF else "model") / name

    def open(self, name: str) -> dict[str, Any]:
        """Let the worker open the model that a file belongs to; return its reply, or the outcome "hang" or "crash"."""
        path = self.place(name) if name == GGUF else self.place(name).parent
        try:
            return self.worker.ask({"path": str(path), "limit_s": self.limit_s}, WALL_S)
        except Ended as ended:
            late = ended.late or -ended.status in (24, 9)  # SIGXCPU
            return {"outcome": "hang" if late else "crash", "said": f"status {ended.status}: {ended.said}"}

    def draw(self, seed: int, number: int, names: Sequence[str]) -> Case:
        """Draw one of the named files and damage it; `seed` and `number` alone decide the result."""
        rng = random.Random(f"{seed} {number}")
        [name] = rng.choices(names, [TARGETS[name] for name in names])
        sound = self.sound[name]
        data = sound
        while data == sound:
            if name == GGUF:
                data = mutate_gguf(rng, self.gguf)
            elif name == "model.safetensors":
                data = mutate_safetensors(rng, sound)
            else:
                json_of = partial(mutate_json, name=name)
                data = (mutate_bytes if rng.random() < BYTES_SHARE else json_of)(rng, sound)
        return Case(number, name, data)

    def judge(self, case: Case) -> tuple[str, str]:
        """Open the model with the damaged file; return ("clean" or a defect, message)."""
        path = self.place(case.name)
        reply = self.open_damaged(path, case)
        if reply["outcome"] == "hang":  # on a busy machine one compilation may exceed the limit, but hardly two
            reply = self.open_damaged(path, case)
        if reply["outcome"] == "refused":
            return judge_refusal(case.name, reply)
        if reply["outcome"] != "loaded":
            return reply["outcome"], reply["said"]
        wrong = [*reply["nonsense"], *self.unexplained(case, reply)]
        return ("nonsense", "; ".join(wrong)[:LONGEST]) if wrong else ("clean", "loaded")

    def open_damaged(self, path: Path, case: Case) -> dict[str, Any]:
        """Open a model with one file damaged, restore the file, and return the reply, with the invalid values
        that the library accepted."""
        self.worker.start()  # a new worker opens the sound models first, so it must start before the damage
        path.write_bytes(case.data)
        try:
            reply = self.open(case.name)
            wrong = nonsense(case.name, path.parent) if reply["outcome"] == "loaded" else []
            return reply | {"nonsense": list(wrong)}
        finally:
            path.write_bytes(self.sound[case.name])

    def unexplained(self, case: Case, reply: Mapping[str, Any]) -> Iterator[str]:
        """Yield each difference from the undamaged model's outcome that the damage cannot explain."""
        sound = self.expected[case.name]
        if not reply["finite"]:
            yield "the scores are not finite"
        if reply["logits"] != sound["logits"] and not self.may_change_scores(case):
            yield "the scores differ from the undamaged model's"
        if case.name not in ("tokenizer.json", GGUF) and reply["ids"] != sound["ids"]:
            yield "the tokens of a text differ from the undamaged model's"
        if case.name == "config.json":
            raw = json.loads(case.data)
            for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
                named = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}.get(field, field)
                if reply["config"][named] != raw[field]:
                    yield f"{field} is {raw[field]!r:.80}, but is read as {reply['config'][named]}"

    def may_change_scores(self, case: Case) -> bool:
        """Return whether the case damages anything that the scores depend on."""
        if case.name == "config.json":
            now, before = json.loads(case.data), json.loads(self.sound[case.name])
            keys = (now.keys() | before.keys()) - INERT_CONFIG
            return any(repr(now.get(key)) != repr(before.get(key)) for key in keys)
        return case.name in ("model.safetensors", GGUF, "plan.json")


def judge_refusal(name: str, reply: Mapping[str, Any]) -> tuple[str, str]:
    """Return ("clean", message) if an error is one readable sentence of this library that names the file, else
    ("unclean", reason)."""
    said = f"{reply['type']}: {reply['said']}"
    if reply["type"] not in ("ValueError", "OSError", "FileNotFoundError", "MemoryError") or not reply["own"]:
        return "unclean", said[:LONGEST]
    names = (name, "plan") if name == "plan.json" else (name, "config.json", "generation_config.json")
    if not any(known in reply["said"] for known in (*names, "the model's scores")):  # scores belong to no file
        return "unclean", f"the error names no file: {said[:LONGEST]}"
    if len(reply["said"]) > LONGEST or not reply["said"].isprintable():
        return "unclean", f"the error is too long or not printable: {said[:LONGEST]!r}"
    return "clean", said


def study(flags: Any) -> int:
    """Run the cases that the file of results lacks, and print a table and the defects.

    With --case, run only that case. Return 1 if there is a defect.
    """
    from rich.console import Console
    from rich.progress import track

    console = Console(soft_wrap=True, highlight=False)
    names = flags.file or tuple(TARGETS)
    if unknown := set(names) - TARGETS.keys():
        raise ValueError(f"--file {min(unknown)} must be one of {', '.join(TARGETS)}")
    with Bench(flags.limit_s, flags.niceness) as bench:
        if flags.case is not None:
            case = bench.draw(flags.seed, flags.case, names)
            console.print(f"{case.name}: {case.data[:2000]!r}", markup=False)
            verdict, said = bench.judge(case)
            console.print(f"{verdict}: {said}", markup=False)
            return int(verdict in DEFECTS)
        notebook = Notebook(flags.out, ["fuzz", flags.seed, list(names), sources()])
        starts = range(0, flags.mutations, BLOCK)
        blocks = []
        for start in track(starts, "opening damaged files", console=Console(stderr=True)):
            numbers = range(start, min(start + BLOCK, flags.mutations))
            blocks.append(
                notebook.keep(f"{start} {len(numbers)}", partial(run_cases, bench, flags.seed, numbers, names))
            )
    return report(console, blocks)


def run_cases(bench: Bench, seed: int, numbers: Sequence[int], names: Sequence[str]) -> dict[str, Any]:
    """Judge the cases; return their counts by file and verdict, and the defects."""
    counts: Counter[str] = Counter()
    defects = []
    for number in numbers:
        case = bench.draw(seed, number, names)
        verdict, said = bench.judge(case)
        counts[f"{case.name} {'loaded' if said == 'loaded' else 'refused' if verdict == 'clean' else verdict}"] += 1
        if verdict in DEFECTS:
            defects.append({"case": number, "file": case.name, "verdict": verdict, "said": said})
    return {"counts": counts, "defects": defects}


def report(console: Any, blocks: Sequence[Mapping[str, Any]]) -> int:
    """Print the counts and the defects; return 1 if there are any."""
    from rich.table import Table

    counts: Counter[str] = sum((Counter(block["counts"]) for block in blocks), Counter())
    columns = ("loaded", "refused", *DEFECTS)
    table = Table("file", *columns)
    for name in TARGETS:
        table.add_row(name, *(str(counts[f"{name} {column}"]) for column in columns))
    console.print(table)
    defects = [defect for block in blocks for defect in block["defects"]]
    for defect in defects[:40]:
        console.print("case {case}, {file}: {verdict}: {said}".format_map(defect), markup=False)
    console.print(f"{sum(counts.values()):,} damaged files, {len(defects)} defects")
    return 1 if defects else 0


# The sound models


def write_models(root: Path) -> Gguf:
    """Write the tiny model in every format; return the parts of its GGUF file."""
    params, tokenizer = random_params(CONFIG), byte_tokenizer()
    for kind in ("whole", "planned"):
        save_folder(root / kind / "model", params, CONFIG, tokenizer)
    save_folder(root / "shards" / "model", params, CONFIG, tokenizer, shard_bytes=6000)
    plan = Plan(
        model=fingerprint(params, CONFIG),
        num_layers=2,
        num_kv_heads=2,
        anchors=(0,),
        head_map=((0, 1), (1, 0)),
        query_tile=16,
        minimum=16,
        metrics={"recall": [0.5, 0.25], "by": {"layer": 1}},
    )
    plan.save(root / "planned" / "model" / "plan.json")
    parts = gguf_parts(params)
    (root / "gguf").mkdir()
    (root / "gguf" / GGUF).write_bytes(parts.encode())
    return parts


def random_params(config: ModelConfig) -> Params:
    """Draw weights with NumPy, so that nothing compiles."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    fill = lambda like: (0.3 + rng.normal(size=like.shape) * like.shape[-1] ** -0.5).astype(like.dtype)  # noqa: E731
    return jax.tree.map(fill, shapes)


def gguf_parts(params: Params) -> Gguf:
    """Build a GGUF file of these weights with a byte-level tokenizer.

    GGUF orders the rows of q and k differently, which does not matter for random weights.
    """
    tokenizer = byte_tokenizer()
    tokens = [tokenizer.backend.id_to_token(index) for index in range(CONFIG.vocab_size)]
    sizes = {
        "block_count": CONFIG.num_layers,
        "context_length": CONFIG.max_positions,
        "embedding_length": CONFIG.hidden_size,
        "feed_forward_length": CONFIG.intermediate_size,
        "attention.head_count": CONFIG.num_heads,
        "attention.head_count_kv": CONFIG.num_kv_heads,
        "rope.dimension_count": CONFIG.head_dim,
        "vocab_size": CONFIG.vocab_size,
    }
    entries = [
        ("general.architecture", STRING, "llama"),
        ("general.alignment", UINT32, 32),
        *((f"llama.{key}", UINT32, value) for key, value in sizes.items()),
        ("llama.attention.layer_norm_rms_epsilon", FLOAT32, 1e-5),
        ("llama.rope.freq_base", FLOAT32, 10000.0),
        ("llama.rope.scaling.type", STRING, "yarn"),
        ("llama.rope.scaling.factor", FLOAT32, 2.0),
        ("llama.rope.scaling.original_context_length", UINT32, 32),
        ("tokenizer.ggml.model", STRING, "gpt2"),
        ("tokenizer.ggml.pre", STRING, "gpt-2"),
        ("tokenizer.ggml.tokens", ARRAY, (STRING, tokens)),
        ("tokenizer.ggml.token_type", ARRAY, (INT32, [1] * 256 + [3] * 8)),
        ("tokenizer.ggml.merges", ARRAY, (STRING, [])),
        ("tokenizer.ggml.bos_token_id", UINT32, 256),
        ("tokenizer.ggml.eos_token_id", UINT32, 257),
        ("tokenizer.ggml.add_bos_token", BOOL, 1),
        ("tokenizer.chat_template", STRING, tokenizer.chat_template),
    ]
    arrays = {w.gguf: getattr(params, w.name) for w in OUTER if getattr(params, w.name) is not None}
    for index, layer in enumerate(_layers(params)):
        named = {w.gguf: getattr(layer, w.name) for w in LAYER if getattr(layer, w.name) is not None}
        arrays |= {f"blk.{index}.{name}": array for name, array in named.items()}
    tensors, data = [], b""
    for name, array in arrays.items():
        array = np.asarray(array, np.float32)
        tensors.append((name, array.shape[::-1], 0, len(data)))
        data += array.tobytes() + bytes(-array.nbytes % 32)
    return Gguf(entries=tuple(entries), tensors=tuple(tensors), data=data)


def _layers(params: Params) -> Sequence[Any]:
    if isinstance(params.layers, tuple):
        return params.layers
    return [jax.tree.map(lambda array, i=i: array[i], params.layers) for i in range(CONFIG.num_layers)]
