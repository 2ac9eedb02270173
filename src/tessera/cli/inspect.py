"""The `tessera inspect` command and its flags. Heavy modules are imported only when the command runs."""

import json
import sys
import threading
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from tessera.cli.flags import MODEL, Command, Omittable, Weights

CALL_ONLY = "role heads kv_heads head_dim dtype window softcap kernel config picture".split()
"""Flags that describe a single attention call, and that --model therefore refuses."""

TIMED_OUT = 3
"""Exit code if the compiler was stopped at --limit-s: it is then unknown whether the call compiles."""

MODEL_ONLY = ("mesh", "attention", "weights", "kv_dtype")
"""Flags that require --model."""


@dataclass(frozen=True, kw_only=True)
class Inspect(Command):
    """Compile an attention kernel for a chip that this machine lacks, and report whether the kernel fits and how
    well it uses the chip.

    Exit code: 0 if the kernel compiles; 1 if it does not, or if its machine code for h200 fails a check; 2 after an
    error, for example if no kernel supports the call; 3 if the compiler was stopped at --limit-s.
    """

    chip: Literal["v5e", "v5p", "v6e", "v7x", "h200"] = "v6e"
    """Chip to compile for. Each of the two cores of a v7x counts as a device. The time for h200 is a roofline bound."""
    role: Literal["dense", "score", "sparse"] = "dense"
    """"dense" reads all keys, "score" also returns every key tile's probability mass, "sparse" reads selected tiles."""
    phase: Literal["prefill", "decode"] = "prefill"
    """"prefill" has many query rows per sequence, "decode" one."""
    batch: int = 1
    """Number of sequences."""
    length: int = 16384
    """Keys per sequence; prefill has as many query rows unless --queries is given."""
    queries: Omittable[int] = None
    """Query rows of one prefill chunk, at the end of the sequence; all rows if not given (2,048 with --model)."""
    heads: int = 32
    """Number of query heads."""
    kv_heads: int = 8
    """Number of key/value heads."""
    head_dim: int = 128
    """Elements per head."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of queries, keys and values."""
    tile: Literal[1, 16, 32, 64, 128] = 128
    """Keys per tile."""
    query_tile: int = 32
    """Number of consecutive queries that read the same tiles."""
    fraction: float = 0.1
    """Share of the key tiles that sparse attention reads (--role sparse, or --model with kascade)."""
    window: Omittable[int] = None
    """Sliding window in tokens; none if not given."""
    softcap: Omittable[float] = None
    """Softcap of the scores, cap * tanh(score / cap); none if not given."""
    model: Annotated[Omittable[str], MODEL] = None
    """Inspect a whole step of this model instead of one call: llama-3.1-8b, a Hugging Face folder, or a GGUF file."""
    mesh: int = 8
    """With --model: number of devices over which every layer is split."""
    attention: Literal["kascade", "dense"] = "kascade"
    """With --model: attention policy; kascade follows its paper, where 5 of 32 layers are anchors."""
    weights: Omittable[Weights] = None
    """With --model: number format of the weight matrices; floats if not given."""
    kv_dtype: Literal["auto", "int8"] = "auto"
    """With --model: dtype of the cached keys and values; auto is the activations'."""
    kernel: Omittable[str] = None
    """Name of the kernel; if not given, the kernel that dispatch chooses for this chip."""
    config: Omittable[str] = None
    """The kernel's block sizes as a JSON object; if not given, the kernel chooses them."""
    limit_s: float = 300.0
    """Seconds after which the compiler is stopped."""
    picture: Omittable[Path] = None
    """File for a picture, such as x.svg, of the roofline and, for a TPU, of the instruction slots used."""
    evidence: Omittable[Path] = None
    """File to which a record of the result is appended."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        self.check()
        if self.model is not None:
            return self.run_model()
        from tessera.attention.contract import AttentionSpec
        from tessera.deviceless import inspection
        from tessera.deviceless.gpu import inspection as gpu_inspection
        from tessera.deviceless.tpu import inspection as tpu_inspection

        names = ("role", "phase", "batch", "length", "queries", "heads", "kv_heads", "head_dim", "dtype", "fraction")
        spec = AttentionSpec(tile=self.tile, query_tile=self.query_tile, window=self.window, softcap=self.softcap)
        spec, shapes = inspection.call(spec=spec, **{name: getattr(self, name) for name in names})
        config = None if self.config is None else self.sizes()
        chips = gpu_inspection if self.chip == "h200" else tpu_inspection
        with self.progress(f"{self.role} {self.phase}"):
            result = chips.inspect_call(
                self.chip, spec, shapes, kernel=self.kernel, config=config, limit_s=self.limit_s
            )
        if self.evidence is not None:
            kernel = result.kernel if self.config is None else f"{result.kernel} {self.config}"
            sizes = dict(zip("BTSNKH", shapes)) | {"tile": self.tile, "query tile": self.query_tile}
            words = " ".join(f"{name} {size}" for name, size in sizes.items())
            self.record("call", kernel, f"{self.role} {self.phase} {words}, {self.chip}", result)
        if self.json:
            print(json.dumps(result.json()))
        else:
            result.print_table()
        if self.picture is not None and result.compiled:
            result.picture(self.picture)
        if result.found.timed_out:
            return TIMED_OUT
        return 0 if result.compiled and not getattr(result, "gates", None) else 1

    def progress(self, what: str):
        """Return a context manager that shows, on a terminal, what is being compiled and the time elapsed."""
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
        console = Console(stderr=True)
        shown = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        shown.add_task(f"compiling {what} for {self.chip}, at most {self.limit_s:g} s (--limit-s)", total=None)
        return shown

    def sizes(self) -> dict:
        try:
            return json.loads(self.config)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"--config {self.config} is not JSON ({error}): write an object such as '{{\"block_s\": 512}}'"
            ) from error

    def check(self) -> None:
        """Raise ValueError for flags that cannot work, before compilation starts."""
        for name in ("batch", "length", "queries", "heads", "kv_heads", "head_dim", "query_tile"):
            value, flag = getattr(self, name), f"--{name.replace('_', '-')}"
            if value is not None and value < 1:
                raise ValueError(f"{flag} {value} must be at least 1")
            if value is not None and value >= 2**31:
                raise ValueError(f"{flag} {value} must be below {2**31:,}: positions and sizes are int32")
        if self.queries is not None and self.queries > self.length:
            raise ValueError(f"--queries {self.queries} must be at most --length {self.length}: raise --length")
        if self.phase == "decode" and self.queries not in (None, 1):
            raise ValueError(
                f"--queries {self.queries} cannot be used with --phase decode, which has one query row: drop it"
            )
        if not 0 < self.fraction <= 1:  # also false for NaN, so that NaN is refused
            raise ValueError(f"--fraction {self.fraction} must be above 0 and at most 1")
        check_limit(self.limit_s)
        defaults = {field.name: field.default for field in fields(self)}
        given = [n for n in (MODEL_ONLY if self.model is None else CALL_ONLY) if getattr(self, n) != defaults[n]]
        if given and self.model is None:
            said = ", ".join(f"--{n} {getattr(self, n)}" for n in given)
            raise ValueError(f"{said} can be used only with --model: name a model, or leave this out")
        if given:
            said = ", ".join(f"--{n.replace('_', '-')}" for n in given)
            raise ValueError(f"{said} cannot be used with --model, which inspects a whole step: leave this out")
        if self.picture is not None:
            check_picture(self.picture)

    def run_model(self) -> int:
        from tessera.deviceless import model_inspection
        from tessera.models.files.ends import describe
        from tessera.models.files.source import find_config

        if self.chip == "h200":
            raise ValueError(f"--chip {self.chip} cannot be used with --model: drop --model, or name a TPU")
        if self.weights == "gguf":
            raise ValueError(
                f"--weights {self.weights} needs the blocks of a GGUF file, but inspect reads no weights: choose "
                f"another format"
            )
        names = ("phase", "batch", "length", "attention", "tile", "query_tile", "fraction", "weights")
        call = {name: getattr(self, name) for name in names} | {"queries": self.queries or min(self.length, 2048)}
        call["cache"] = None if self.kv_dtype == "auto" else self.kv_dtype
        config, source = find_config(self.model)
        if source is not None and not self.json:
            print(describe(source.ends))
        with self.progress(f"one {self.phase} step of {self.model}"):
            result = model_inspection.inspect_step(
                self.chip, self.model, self.mesh, config=config, limit_s=self.limit_s, **call
            )
        if self.json:
            listed = {} if source is None else {"ends": [end._asdict() for end in source.ends]}
            print(json.dumps(result.json() | listed))
        else:
            model_inspection.print_step(result)
        if self.evidence is not None:
            sizes = f"B {self.batch} T {1 if self.phase == 'decode' else call['queries']} S {self.length}"
            bits = "".join(f", {value} {n}" for n in ("weights", "cache") if (value := call[n]))
            words = f"{self.model} {self.phase} {sizes}, {self.mesh} x {self.chip}{bits}"
            self.record("step", self.attention, words, result)
        return TIMED_OUT if result.timed_out else 0 if result.compiled else 1

    def record(self, what: str, kernel: str, workload: str, result) -> None:
        """Append a record of the result, or of its error, to --evidence; the record says that nothing was measured."""
        from tessera.measure import evidence

        ms, kind, check = "predicted_ms", "predicted", "predicted from the compiler's schedule, not measured"
        if self.chip == "h200":
            ms, kind, check = "roofline_ms", "roofline of", "a bound from the call's work, not measured"
        time, error = getattr(result, ms), result.error
        if time is None and result.compiled:  # no time was predicted: store only the facts
            error = result.bound_by
        made = evidence.make(
            evidence.What(op=f"{kind} {what}", kernel=kernel, workload=workload, dtype=self.dtype),
            [] if time is None else [time / 1e3],
            command=" ".join(
                ["tessera inspect", *(a for a in sys.argv[2:] if a not in ("--evidence", str(self.evidence)))]
            ),
            how=evidence.How(compile_s=result.compile_s, check=check),
            facts=result.json(),
            error=error,
        )
        evidence.append(self.evidence, made)


def check_limit(limit_s: float) -> None:
    """Raise ValueError unless --limit-s is above 0 and at most threading.TIMEOUT_MAX."""
    if not 0 < limit_s <= threading.TIMEOUT_MAX:
        most = f"{threading.TIMEOUT_MAX:,.0f} seconds"
        raise ValueError(f"--limit-s {limit_s} must be above 0 and at most {most}")


def check_picture(path: Path) -> None:
    """Raise an error if --picture cannot be written: no matplotlib, an unknown file format, or a missing folder."""
    from tessera.core.extras import require

    require("matplotlib", "report")
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise ValueError(f"--picture {path} must end in one of {', '.join(f'.{kind}' for kind in kinds)}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {path.parent} for --picture does not exist: create it")
