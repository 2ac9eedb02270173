"""The flags of `tessera inspect`. Heavy imports wait until it runs."""

import json
import sys
import threading
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from tessera.cli.flags import MODEL, Omittable

CALL_ONLY = "role heads kv_heads head_dim dtype window softcap kernel config picture".split()
"""Flags that a step of a model does not take."""

TIMED_OUT = 3
"""Exit code if the compiler was stopped: whether the call compiles is unknown."""

MODEL_ONLY = ("mesh", "attention")
"""Flags that a single call does not take."""


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Compile an attention kernel for a chip this machine lacks: does it fit, what fills it, how long should it take.

    Exit code: 0, it compiles; 1, it does not or, for h200, breaks a gate; 2, no kernel takes the call; 3, the compiler
    was stopped at --limit-s.
    """

    chip: Literal["v5e", "v5p", "v6e", "v7x", "h200"] = "v6e"
    """Chip to compile for; v7x counts each of its two cores as a device. For h200 the time is a roofline."""
    role: Literal["dense", "score", "sparse"] = "dense"
    """Read all keys; or read all keys and return every tile's mass; or read selected tiles only."""
    phase: Literal["prefill", "decode"] = "prefill"
    """Many query rows per sequence, or one."""
    batch: int = 1
    """Sequences."""
    length: int = 16384
    """Keys per sequence; prefill has as many queries."""
    queries: Omittable[int] = None
    """Query rows of one prefill chunk, the last ones of the length; all if not given (2,048 with --model)."""
    heads: int = 32
    """Query heads."""
    kv_heads: int = 8
    """Key/value heads."""
    head_dim: int = 128
    """Elements per head."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of queries, keys and values."""
    tile: Literal[1, 16, 32, 64, 128] = 128
    """Keys per tile."""
    query_tile: int = 32
    """Queries that share a selection."""
    fraction: float = 0.1
    """Share of the key tiles that the sparse role reads."""
    window: Omittable[int] = None
    """Sliding window in tokens; none if not given."""
    softcap: Omittable[float] = None
    """Cap on the scores; none if not given."""
    model: Annotated[Omittable[str], MODEL] = None
    """Inspect a whole step of this model instead of one call: llama-3.1-8b, a Hugging Face folder, or a GGUF file."""
    mesh: int = 8
    """With --model: devices that share every layer."""
    attention: Literal["kascade", "dense"] = "kascade"
    """With --model: attention policy; kascade has five anchors."""
    kernel: Omittable[str] = None
    """Kernel by name; the one that runs on this chip if not given."""
    config: Omittable[str] = None
    """The kernel's block sizes as a JSON object; its own choice if not given."""
    limit_s: float = 300.0
    """Seconds after which the compiler is stopped."""
    picture: Omittable[Path] = None
    """Write the roofline and the slots to this SVG."""
    evidence: Omittable[Path] = None
    """Append a record of the result to this file."""
    json: bool = False
    """Print one JSON object."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Print the result and return the exit code."""
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
        """Return a context that shows on a terminal what is compiled, and since when."""
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
        console = Console(stderr=True)
        shown = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        shown.add_task(f"compiling {what} for {self.chip}, at most {self.limit_s:g} s (--limit-s)", total=None)
        return shown

    def sizes(self) -> dict:
        """Parse --config."""
        try:
            return json.loads(self.config)
        except json.JSONDecodeError as error:
            raise ValueError(f"--config {self.config} is not JSON ({error}): write '{{\"block_s\": 512}}'") from error

    def check(self) -> None:
        """Refuse, before a compile starts, flags that can only fail."""
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
        if not 0 < self.fraction <= 1:  # refuses NaN too, as below
            raise ValueError(f"--fraction {self.fraction} must be above 0 and at most 1")
        if not 0 < self.limit_s <= threading.TIMEOUT_MAX:
            most = f"{threading.TIMEOUT_MAX:,.0f} seconds"
            raise ValueError(f"--limit-s {self.limit_s} must be above 0 and at most {most}")
        defaults = {field.name: field.default for field in fields(self)}
        given = [n for n in (MODEL_ONLY if self.model is None else CALL_ONLY) if getattr(self, n) != defaults[n]]
        if given and self.model is None:
            said = ", ".join(f"--{n} {getattr(self, n)}" for n in given)
            raise ValueError(f"{said} needs --model, whose step it describes: name a model, or drop it")
        if given:
            said = ", ".join(f"--{n.replace('_', '-')}" for n in given)
            raise ValueError(f"{said} cannot be used with --model: they describe a single call")
        if self.picture is not None:
            check_picture(self.picture)

    def run_model(self) -> int:
        """Print the result for a whole step and return the exit code."""
        from tessera.deviceless import model_inspection

        if self.chip == "h200":
            raise ValueError(f"--chip {self.chip} inspects single calls: drop --model, or name a TPU")
        names = ("phase", "batch", "length", "attention", "tile", "query_tile", "fraction")
        call = {name: getattr(self, name) for name in names} | {"queries": self.queries or min(self.length, 2048)}
        with self.progress(f"one {self.phase} step of {self.model}"):
            result = model_inspection.inspect_step(self.chip, self.model, self.mesh, limit_s=self.limit_s, **call)
        if self.json:
            print(json.dumps(result.json()))
        else:
            model_inspection.print_step(result)
        if self.evidence is not None:
            sizes = f"B {self.batch} T {1 if self.phase == 'decode' else call['queries']} S {self.length}"
            self.record("step", self.attention, f"{self.model} {self.phase} {sizes}, {self.mesh} x {self.chip}", result)
        return TIMED_OUT if result.timed_out else 0 if result.compiled else 1

    def record(self, what: str, kernel: str, workload: str, result) -> None:
        """Append the result, or its error, as a record, which states that nothing was measured."""
        from tessera.workbench import evidence

        ms, kind, check = "predicted_ms", "predicted", "predicted from the compiler's schedule, not measured"
        if self.chip == "h200":
            ms, kind, check = "roofline_ms", "roofline of", "a bound from the call's work, not measured"
        time, error = getattr(result, ms), result.error
        if time is None and result.compiled:  # nothing to predict from: store only the facts
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


def check_picture(path: Path) -> None:
    """Refuse a picture that cannot be written."""
    from tessera.core.extras import require

    require("matplotlib", "report")
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise ValueError(f"--picture {path} must end in one of {', '.join(f'.{kind}' for kind in kinds)}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {path.parent} for --picture does not exist: create it")
