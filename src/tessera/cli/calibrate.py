"""The `tessera calibrate` command and its flags. Heavy modules are imported only when the command runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tessera.cli.flags import FILE, MODEL, Command, Dtype, Omittable
from tessera.cli.model_commands import named_model

if TYPE_CHECKING:
    from tessera.sparse.plan import Plan

SHAPING = ("keep", "max_kl", "anchors", "tile", "query_tile", "local", "sinks", "fraction", "minimum", "heads")
"""Flags that decide what the plan reads."""
MEASURING = ("crossover", "decode_crossover", "max_tokens")


@dataclass(frozen=True, kw_only=True)
class Calibrate(Command):
    """Measure on a text how many keys each layer and head of a model must read, and write a Kascade plan.

    If a search for a plan is interrupted, the same command resumes it.
    """

    text: Annotated[Path, FILE]
    """Text file, or folder of text files."""
    model: Annotated[Omittable[str], MODEL] = None
    """Hugging Face folder, GGUF file, hub id or "smollm2" (see fetch); the shipped demo model if not given."""
    out: Path = Path("plan.json")
    """File to write the plan to. Other commands find the plan without a flag if this file is plan.json in the model's
    folder, or x.plan.json next to x.gguf."""
    plan: Omittable[Path] = None
    """Plan file. Instead of searching for a plan, measure this plan again: what it keeps on the text, and from how many
    tokens it is faster than dense on this device."""
    keep: Omittable[float] = None
    """Target: keep at least this share of the probability that dense attention gives the right next token, on held-out
    text and on facts planted in it; 0.99 if none of --keep, --max-kl and --anchors is given."""
    max_kl: Omittable[float] = None
    """Target: keep KL(dense || plan) at or below this many nats per token, on the same text and facts."""
    anchors: Omittable[int] = None
    """Use the recipe of the Kascade paper, which has no target: this many layers (the anchors) score all keys. The
    paper uses 5 of 32 layers."""
    tile: Literal[1, 16, 32, 64, 128] = 16
    """Keys per tile."""
    query_tile: int = 32
    """Number of consecutive queries that read the same tiles."""
    local: int = 64
    """Number of keys just before a query tile that are always read."""
    sinks: int = 16
    """Number of keys at the start of the sequence that are always read."""
    fraction: Omittable[float] = None
    """With --anchors: share of the visible keys that a layer reads if it is not an anchor, besides local keys and
    sinks; 0.1 if not given."""
    minimum: int = 128
    """Minimum number of keys that a sparse layer reads, besides local keys and sinks."""
    heads: Omittable[Literal["remap", "identity", "pooled"]] = None
    """With --anchors: the head of the anchor layer whose selection a head uses: the most similar head ("remap") or the
    head with the same number ("identity"). With "pooled", all heads share one selection. "remap" if not given."""
    crossover: Omittable[int] = None
    """Position below which prompt tokens run dense; measured if not given."""
    decode_crossover: Omittable[int] = None
    """Position below which answer tokens run dense; if not given, measured, or the number of --crossover if given."""
    max_tokens: int = 65536
    """Maximum number of tokens to take from the text, spread evenly over it."""
    dtype: Dtype = "auto"
    """Dtype of the weights; auto is the checkpoint's own."""

    def run(self) -> int:
        """Write the plan and print what it keeps."""
        from tessera.core.files import sole_writer
        from tessera.generate import load
        from tessera.sparse.promise import summary

        check_out(self.out)
        given = self.given_plan()
        notes = self.out.with_name(f"{self.out.name}.partial")
        model = load(named_model(self.model), dtype=self.dtype)
        with sole_writer(self.out):
            plan = self.search(model, notes) if given is None else self.measure_again(model, given)
            plan.save(self.out)
            notes.unlink(missing_ok=True)
        decode = plan.crossover_tokens if plan.decode_crossover is None else plan.decode_crossover
        dense_below = f"prompt tokens below {plan.crossover_tokens:,} and answer tokens below {decode:,} run dense"
        print(f"{self.out}: {dense_below}", *summary(plan), sep="\n")
        return 0

    def given_plan(self) -> "Plan | None":
        """Load the file of --plan, if given; raise ValueError for flags that would change the plan."""
        from tessera.sparse.plan import Plan

        if self.plan is None:
            return None
        standard = Calibrate(text=self.text)
        if given := [name for name in SHAPING if getattr(self, name) != getattr(standard, name)]:
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ValueError(
                f"--plan measures {self.plan} as it is, but {flags} would change it: drop --plan, or drop {flags}"
            )
        return Plan.load(self.plan)

    def measure_again(self, model: Any, plan: "Plan") -> "Plan":
        """Measure the plan's promise and cross-over again, on --text and this device."""
        from tessera.calibration.remeasure import measure_again

        return measure_again(model, plan, self.text, **{name: getattr(self, name) for name in MEASURING})

    def search(self, model: Any, notes: Path) -> "Plan":
        """Search for a plan; the file `notes` stores each measurement, so that the same command can resume."""
        from tessera.calibration.calibrate import calibrate

        flags = {name: getattr(self, name) for name in (*SHAPING, *MEASURING)}
        if (self.keep, self.max_kl, self.anchors) == (None, None, None):
            flags["keep"] = 0.99
        return calibrate(model, self.text, notes=notes, **flags)


def check_out(path: Path) -> None:
    """Raise an error if a plan cannot be written to this path, or would replace a file that is not a plan."""
    from tessera.core.files import check_writable
    from tessera.models.files.checkpoint import is_model_file
    from tessera.sparse.plan import Plan

    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {path.parent} for --out does not exist: create it")
    if path.is_dir():
        raise ValueError(f"--out {path} is a folder: name a file in it, such as {path / 'plan.json'}")
    if is_model_file(path.name):
        raise ValueError(f"--out {path} is the name of a model's file: name another file, such as plan.json")
    if path.exists():
        try:
            Plan.load(path)
        except (ValueError, OSError) as error:
            raise ValueError(f"--out {path} exists and is not a plan: name another file, or delete it") from error
    check_writable(path)
