"""The command line: one frozen dataclass per subcommand, whose fields are its flags.

Heavy imports wait until a command runs.
"""

import json
import logging
import os
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, Union

import tyro

from tessera.cli.calibrate import Calibrate
from tessera.cli.inspect import Inspect
from tessera.cli.model_commands import Convert, Fetch, named_model
from tessera.cli.study import Study
from tessera.cli.workbench import Bench, Eval, Report, Tune, Verify
from tessera.core.escapes import escaped

Attention = Literal["dense", "kascade", "window", "oracle"]
DESCRIPTION = "LLaMA-family models at long context in JAX: attention reads only the key tiles that matter."


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Flags that select a model and its attention."""

    model: str | None = None
    """Hugging Face folder, GGUF file, hub id or "smollm2" (see fetch); the shipped demo model if not given."""
    attention: Attention = "dense"
    """Attention policy."""
    plan: Path | None = None
    """Kascade plan; if not given, plan.json in the model's folder, or x.plan.json next to x.gguf."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of weights and cache; the checkpoint's own if not given."""
    debug: bool = False
    """Show the traceback of an error."""

    def load(self):
        """Load the model that these flags name."""
        from tessera.generate import load

        if self.plan is not None and self.attention != "kascade":
            raise ValueError(f"--plan {self.plan} is not for --attention {self.attention}: add --attention kascade")
        return load(named_model(self.model), dtype=self.dtype, attention=self.attention, plan=self.plan)


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Flags that control sampling."""

    temperature: float = 0.0
    """0 takes the best token; any other value divides the logits before sampling."""
    top_k: int | None = None
    """Draw from the k best tokens only."""
    top_p: float | None = None
    """Draw from the fewest tokens that hold this much probability."""
    min_p: float | None = None
    """Draw only from tokens with at least this share of the best one's probability."""
    repetition_penalty: float = 1.0
    """Above 1, tokens already in the prompt or the answer become less likely."""
    seed: int = 0
    """Same seed, same answer."""

    def values(self) -> dict[str, float | int | None]:
        """Return the sampling arguments of Model.generate."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class Generate(ModelFlags, SamplingFlags):
    """Continue one or more prompts."""

    prompt: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[PROMPT ...]")] = ()
    """Prompts; - reads one from standard input."""
    file: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """A file that holds one prompt; may be repeated."""
    max_new_tokens: int = 128
    """Maximum number of tokens to generate per prompt."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Stop when this text appears, and trim it off; may be repeated."""
    chat: bool = False
    """Treat each prompt as a user's message and apply the model's chat template."""
    tokens: bool = False
    """Read prompts as token ids, separated by spaces or commas, and print token ids."""
    stream: bool = False
    """Print text as it is generated (one prompt)."""
    json: bool = False
    """Print one JSON object per prompt, each on its own line."""

    def run(self) -> int:
        """Print each prompt's continuation on standard output."""
        from tessera.generate import Interrupted
        from tessera.runtime.sampling import Sampling
        from tessera.sparse.promise import promise_note

        Sampling(**self.values())  # raises before a model is read
        prompts = self.read_prompts()
        if self.stream and (self.json or self.tokens or len(prompts) > 1):
            raise ValueError("--stream prints the text of one prompt: drop --json and --tokens, or pass one prompt")
        if self.chat and self.tokens:
            raise ValueError("--chat takes messages and --tokens takes ids: drop one of them")
        model = self.load()
        if self.chat:
            if model.tokenizer is None:
                raise ValueError(f"--chat needs a chat template, and {model.source} has no tokenizer")
            prompts = [model.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in prompts]
        arguments = self.values() | {"max_new_tokens": self.max_new_tokens, "stop": self.stop, "seed": self.seed}
        if self.stream:
            arguments["stream"] = lambda _, piece: print(piece, end="", flush=True)
        try:
            results, status = model.generate(prompts, **arguments), 0
        except Interrupted as interruption:
            results, status = interruption.generations, 130
        if self.stream:
            print()
        else:
            self.show(results)
        if note := promise_note(model.plan):
            for result in results:
                print(f"({result.usage()}; {note})", file=sys.stderr)
        if status:
            print("interrupted", file=sys.stderr)
        return status

    def read_prompts(self) -> list[str] | list[list[int]]:
        """Read the prompts: the command line's (- is standard input), then those of files."""
        if not self.prompt and not self.file:
            raise ValueError("no prompt: pass one in quotes, --file FILE, or - to read standard input")
        texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in self.prompt]
        texts += [read_text(path) for path in self.file]
        return [parse_tokens(text) for text in texts] if self.tokens else texts

    def show(self, results) -> None:
        """Print all answers as JSON lines or as plain text, each under a heading if there are several."""
        for index, result in enumerate(results):
            if self.json:
                # JSON has no NaN: a rate over fewer than two tokens is null
                print(json.dumps({k: None if v != v else v for k, v in asdict(result).items()}))
                continue
            if len(results) > 1:
                print(f"--- {index}")
            print(" ".join(map(str, result.tokens)) if self.tokens else result.text)


@dataclass(frozen=True, kw_only=True)
class Chat(ModelFlags, SamplingFlags):
    """Chat with a model; /help inside lists the commands."""

    system: str | None = None
    """System message, if the model's template takes one."""
    max_new_tokens: int = 256
    """Maximum number of tokens per answer."""

    def run(self) -> int:
        """Converse until the input ends; return 2 if the input was a file or pipe and a line of it was refused."""
        from tessera.chat import Chat as Conversation
        from tessera.chat import converse, typed_lines
        from tessera.runtime.sampling import Sampling

        sampling = Sampling(**self.values())
        model = self.load()
        chat = Conversation(model, sampling, max_new_tokens=self.max_new_tokens, system=self.system, seed=self.seed)
        interactive = sys.stdin.isatty()
        good = converse(chat, typed_lines(), interactive=interactive)
        return 0 if good or interactive else 2  # an interactive user saw the error and continued


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a model by a recipe; a restart resumes from the newest checkpoint."""

    out: Path
    """Folder for checkpoints, the loss curve and the model."""
    recipe: Literal["demo", "tiny"] = "demo"
    """Recipe: "demo" trains the shipped model, "tiny" checks in seconds that everything runs."""
    save_every_s: float = 120.0
    """Seconds between checkpoints."""
    until: int | None = None
    """Stop after this many steps in total."""
    text: Path | None = None
    """Train on this file or folder of text instead of the recipe's data."""
    base: str | None = None
    """With --text: folder, GGUF file or hub id to start from; fresh weights of the demo's size if not given."""
    steps: int = 1000
    """With --text: number of updates, over which the learning rate falls to a tenth."""
    length: int = 512
    """With --text: tokens per sequence."""
    batch: int = 8
    """With --text: sequences per step."""
    rate: float = 1e-3
    """With --text: initial learning rate."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Train until the recipe ends."""
        from tessera.train.loop import train
        from tessera.train.recipes import RECIPES

        if self.text is None and self.base is not None:
            raise ValueError(f"--base {self.base} needs --text, the text to train on")
        recipe = RECIPES[self.recipe] if self.text is None else self.own_recipe()
        train(recipe, self.out, save_every_s=self.save_every_s, until=self.until)
        return 0

    def own_recipe(self):
        """Build the recipe that --text and its companion flags describe."""
        from tessera.models.checkpoint import read_config, resolve
        from tessera.train.recipes import DEMO_CONFIG, text_recipe

        base = None if self.base is None else resolve(self.base)
        config = DEMO_CONFIG if base is None else read_config(base)
        flags = {name: getattr(self, name) for name in ("steps", "length", "batch", "rate")}
        return text_recipe(self.text, config=config, base=base, **flags)


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Ask a real model (offline: the shipped one) about a long document, dense and with Kascade, and compare."""

    out: Path = Path("build/demo")
    """Folder for record.json and index.html."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Run the demo; return 1 if Kascade kept no more answers than the control (shipped model: if any differs)."""
        from tessera.core.extras import require

        require("matplotlib", "report")
        from tessera.demo.run import run

        return run(self.out)


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Inspect this installation: versions, devices, kernels and why they run, caches, memory."""

    plan: Path | None = None
    """Also report what this plan promised and measured."""
    model: str | None = None
    """Also report what the plan of this model promised and measured, if it fits."""
    json: bool = False
    """Print JSON."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Print the report; return 1 if anything is wrong."""
        from tessera import doctor

        found = doctor.examine(self.plan) if self.model is None else doctor.examine(*self.plan_of_model())
        if self.json:
            print(json.dumps(found, indent=1))
        else:
            doctor.print_report(found)
        return 1 if found["problems"] else 0

    def plan_of_model(self):
        """Return the plan file of --model (or --plan) and the config that it must fit."""
        from tessera.generate import locate_plan, plan_path
        from tessera.models.checkpoint import read_config, resolve

        source = resolve(self.model)
        plan = self.plan or locate_plan(source)
        if plan is None:
            raise FileNotFoundError(
                f"--model {self.model} has no plan at {plan_path(source)}: make one with `tessera calibrate`"
            )
        return plan, read_config(source)


COMMANDS = MappingProxyType(
    {
        "generate": Generate,
        "chat": Chat,
        "calibrate": Calibrate,
        "fetch": Fetch,
        "convert": Convert,
        "train": Train,
        "demo": Demo,
        "doctor": Doctor,
        "bench": Bench,
        "verify": Verify,
        "tune": Tune,
        "eval": Eval,
        "report": Report,
        "inspect": Inspect,
        "study": Study,
    }
)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code.

    A user's error prints one line on standard error and returns 2; Ctrl-C returns 130.
    """
    argv = sys.argv[1:] if argv is None else argv
    hide_absent_chips()
    if argv == ["--version"]:
        from importlib.metadata import version

        print(f"tessera {version('tessera-attention')}")
        return 0
    command = parse(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("tessera").setLevel(logging.INFO)
    try:
        return command.run()
    except KeyboardInterrupt as interruption:
        print(f"interrupted: {interruption}".removesuffix(": "), file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader closed our output: there is nowhere to report it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, MemoryError) as error:
        if command.debug:
            raise
        print(f"error: {escaped(error, None)}", file=sys.stderr)
        return 2
    except RuntimeError as error:  # from the device, or a bug of ours
        if command.debug:
            raise
        said = f"{type(error).__name__}: {escaped(error, 500)}"
        print(f"error: {said} (--debug shows where)", file=sys.stderr)
        return 2


def hide_absent_chips() -> None:
    """Keep JAX from probing for chips that this host lacks: the plug-ins of the extra "deviceless" complain at length.

    An NVIDIA GPU shows as /dev/nvidia0, or as /dev/dxg under WSL.
    """
    patterns = ("accel*", "vfio/[0-9]*", "nvidia[0-9]*", "dxg")
    chips = [file for pattern in patterns for file in Path("/dev").glob(pattern)]
    compilers = [name for name in ("libtpu", "jax_cuda13_plugin", "jax_cuda12_plugin") if find_spec(name)]
    if compilers and not chips and not find_spec("jax_rocm7_plugin"):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def parse(argv: list[str]):
    """Parse the arguments into a command with its flags."""
    kinds = [Annotated[kind, tyro.conf.subcommand(name=name)] for name, kind in COMMANDS.items()]
    config = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes)
    return tyro.cli(Union[*kinds], prog="tessera", description=DESCRIPTION, args=argv or ["--help"], config=config)


def parse_tokens(text: str) -> list[int]:
    """Parse token ids separated by spaces or commas."""
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"--tokens takes ids like 1,2,3, got {text!r:.60}") from None


def read_text(path: Path) -> str:
    """Read a UTF-8 text file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}): convert it first") from None


if __name__ == "__main__":
    sys.exit(main())
