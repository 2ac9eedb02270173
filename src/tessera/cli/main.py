"""The command line: one frozen dataclass per subcommand, whose fields are its flags. Heavy modules are imported only
when a command runs."""

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

import tyro

from tessera.cli import command_line, flags, remote
from tessera.cli.calibrate import Calibrate
from tessera.cli.fit import Fit
from tessera.cli.flags import FILE, MODEL, PROMPT, SYSTEM, TOKENS, WORDS, Command, Dtype, Omittable, SamplingFlags
from tessera.cli.inspect import Inspect
from tessera.cli.measure import Bench, Eval, Tune, Verify
from tessera.cli.model_commands import Convert, Fetch, named_model
from tessera.cli.processes import ProcessFlags
from tessera.cli.serve import Serve
from tessera.cli.train import Train
from tessera.core import interrupt

Attention = Literal["dense", "kascade", "window", "oracle"]
DESCRIPTION = """LLaMA-family models at long context in JAX: attention reads only the key tiles that matter.

-V, --version prints the version."""


@dataclass(frozen=True, kw_only=True)
class ModelFlags(Command):
    """Flags that select a model and its attention."""

    model: Annotated[Omittable[str], MODEL] = None
    """Hugging Face folder, GGUF file, hub id or "smollm2" (see fetch); the shipped demo model if not given."""
    attention: Attention = "dense"
    """Attention policy. "dense" reads all keys; "kascade" reads the key tiles that it selects under its plan. For
    comparison: "window" reads the first keys and the most recent ones, "oracle" the tiles that exact scores rank
    best."""
    plan: Omittable[Path] = None
    """Kascade plan; if not given, plan.json in the model's folder or x.plan.json next to x.gguf, else the plan shipped
    for the model."""
    dtype: Dtype = "auto"
    """Dtype of weights and cache; auto is the checkpoint's own."""
    mesh: Omittable[str] = None
    """Devices that share the model: a number, such as 8, or heads x context, such as 4x1; one device if not given."""
    kv_dtype: Literal["auto", "int8"] = "auto"
    """Dtype of cached keys and values; auto is the weights'. int8 takes about half of bfloat16's memory."""
    weights: Omittable[flags.Weights] = None
    """Store the weight matrices in fewer bits: int8 takes half of bfloat16's memory and loses the least quality; in
    int4-gN, N inputs share a scale; w8a8 also rounds activations; gguf keeps a GGUF file's Q4_0, Q4_1 and Q8_0 tensors
    as stored. Floats if not given."""

    @cached_property
    def source(self):
        """The model's files, opened once."""
        from tessera.models.files.source import resolve

        return resolve(named_model(self.model))

    def load(self):
        from tessera.generate import load

        if self.plan is not None and self.attention != "kascade":
            raise ValueError(
                f"--plan {self.plan} cannot be used with --attention {self.attention}: use --attention kascade, "
                f"or drop --plan"
            )
        names = ("dtype", "weights", "kv_dtype", "attention", "plan", "mesh")
        return load(self.source, **{name: getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class Generate(ModelFlags, SamplingFlags, ProcessFlags):
    """Continue one or more prompts."""

    prompt: Annotated[tuple[str, ...], tyro.conf.Positional, WORDS] = ()
    """Prompts; "-" reads one prompt from standard input."""
    option: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], PROMPT] = ()
    """A prompt, given as a flag; may be repeated."""
    file: Annotated[tyro.conf.UseAppendAction[tuple[Path, ...]], FILE] = ()
    """A file that holds one prompt; may be repeated."""
    max_new_tokens: Annotated[Omittable[int], TOKENS] = None
    """Maximum number of tokens to generate per prompt; if not given, the value in generation_config.json, else 128."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Stop when this text appears, and cut the answer before it; may be repeated."""
    chat: bool = False
    """Treat each prompt as a user's message and apply the model's chat template."""
    parse_special: bool = False
    """With --chat: read names of special tokens in messages, such as <|end|>, as these tokens instead of as text."""
    tokens: bool = False
    """Read prompts as token ids, separated by spaces or commas, and print token ids."""
    stream: bool = False
    """Print text as it is generated. Needs exactly one prompt."""
    json: bool = False
    """Print one JSON object per prompt, each on its own line."""
    stats: bool = False
    """Also print, on standard error, token counts, rates, and shares of the device's peak rates. The peak rates of a
    CPU are measured after the answers."""

    def run(self) -> int:
        """Print each prompt's continuation on standard output."""
        sampling = self.values()  # raises errors before the model is loaded
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(
                f"--max-new-tokens {self.max_new_tokens} must be at least 1: name the longest answer you want"
            )
        prompts = self.read_prompts()
        if self.stream and (self.json or self.tokens or len(prompts) > 1):
            raise ValueError("--stream prints the text of one prompt: drop --json and --tokens, or pass one prompt")
        if self.chat and self.tokens:
            raise ValueError("--chat takes messages and --tokens takes ids: drop one of them")
        if self.parse_special and not self.chat:
            raise ValueError(
                "--parse-special needs --chat; without --chat, special tokens are always parsed: drop --parse-special"
            )
        return self.run_together(lambda: self.answer(prompts, sampling), prompts)

    def answer(self, prompts: list, sampling: dict) -> int:
        from tessera.cli.prompt_bar import PromptBar
        from tessera.cli.stats import stats_lines, usage_lines
        from tessera.generate import Interrupted

        model = self.load()
        advice = "" if self.chat or self.tokens else template_advice(model, prompts)
        if self.chat:
            if model.tokenizer is None:
                raise ValueError(f"--chat needs a tokenizer, and {model.source} has none: add its tokenizer.json")
            encode, parse_special = model.tokenizer.encode_chat, self.parse_special
            prompts = [encode([{"role": "user", "content": text}], parse_special=parse_special) for text in prompts]
        prompts = model.encode_prompts(prompts)  # raises errors before anything is printed
        say(model.generation_config.note(sampling), advice)
        arguments = sampling | {"max_new_tokens": self.max_new_tokens, "stop": self.stop, "seed": self.seed}
        if self.stream:
            arguments["stream"] = lambda _, piece: print(piece, end="", flush=True)
        try:
            with PromptBar() as bar:
                results, status = model.generate(prompts, progress=bar.show, **arguments), 0
        except Interrupted as interruption:
            results, status = interruption.generations, interrupt.STATUS
        if self.stream:
            print()
        else:
            self.show(results)
        say(*(stats_lines(model, results) if self.stats else usage_lines(model, results)))
        if status:
            print("interrupted", file=sys.stderr)
        return status

    def read_prompts(self) -> list[str] | list[list[int]]:
        """Read the prompts on the command line ("-" means standard input), then the prompts in --file."""
        prompts = (*self.prompt, *self.option)
        if not prompts and not self.file:
            raise ValueError("no prompt: pass one in quotes, --file FILE, or - to read standard input")
        with interrupt.at_once():
            texts = [read_stdin() if prompt == "-" else prompt for prompt in prompts]
        texts += [read_text(path) for path in self.file]
        return [parse_tokens(text) for text in texts] if self.tokens else texts

    def show(self, results) -> None:
        """Print all answers as JSON lines, or as plain text with a heading above each if there are several."""
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
    """Chat with a model; type /help in the chat to list its commands."""

    system: Annotated[Omittable[str], SYSTEM] = None
    """System message; only for a model whose chat template accepts one."""
    max_new_tokens: Annotated[Omittable[int], TOKENS] = None
    """Maximum number of tokens per answer; if not given, the value in generation_config.json, else 256."""
    parse_special: bool = False
    """Read names of special tokens in messages, such as <|end|>, as these tokens instead of as text."""
    url: Omittable[str] = None
    """Address of a server, such as http://127.0.0.1:8000, whose model answers; no model is loaded here."""
    api_key_file: Omittable[Path] = None
    """File whose first key is the API key for --url."""

    def run(self) -> int:
        """Run the conversation until the input ends; return 2 if the input is a file or pipe and an entry failed."""
        from tessera.cli.conversation import converse, typed_line

        interactive = sys.stdin.isatty()
        with nullcontext(self.local()) if self.url is None else remote.conversation(self, say) as chat:
            good = converse(chat, typed_line, interactive=interactive)
        return 0 if good or interactive else 2  # an interactive user saw the error and continued

    def local(self):
        from tessera.chat import NEW_TOKENS
        from tessera.chat import Chat as Conversation

        if self.api_key_file is not None:
            raise ValueError(f"--api-key-file {self.api_key_file} is for a server: add --url, or drop it")
        given = self.values()
        model = self.load()
        say(model.generation_config.note(given))
        flags = {name: getattr(self, name) for name in ("system", "seed", "parse_special")}
        flags["max_new_tokens"] = model.max_new_tokens(self.max_new_tokens, NEW_TOKENS)
        return Conversation(model, model.sampling(**given), **flags)


@dataclass(frozen=True, kw_only=True)
class Doctor(Command):
    """Inspect this installation: versions, devices, which kernels run and why, caches, memory."""

    plan: Omittable[Path] = None
    """Also report this plan's promise and measured values."""
    model: Annotated[Omittable[str], MODEL] = None
    """Also report the promise and measured values of this model's plan, and a problem if the plan does not fit."""
    all: bool = False
    """Print every version, and why the other kernels do not run."""
    json: bool = False
    """Print the whole report as JSON."""

    def run(self) -> int:
        """Print the report; return 1 if anything is wrong."""
        from tessera import doctor

        found = doctor.examine(self.plan) if self.model is None else doctor.examine(*self.plan_of_model())
        if self.json:
            print(json.dumps(found, indent=1))
        else:
            (doctor.print_report if self.all else doctor.print_summary)(found)
        return 1 if found["problems"] else 0

    def plan_of_model(self):
        """Return the plan file (--plan, else the one of --model) and the config of --model, which the plan must fit."""
        from tessera.generate import locate_plan, plan_path
        from tessera.models.files.source import resolve

        source = resolve(self.model)
        plan = self.plan or locate_plan(source.path)
        if plan is None:
            raise FileNotFoundError(
                f"--model {self.model} has no plan at {plan_path(source.path)}: make one with `tessera calibrate`"
            )
        return plan, source.config


COMMANDS = MappingProxyType(
    {
        "generate": Generate,
        "chat": Chat,
        "serve": Serve,
        "calibrate": Calibrate,
        "fetch": Fetch,
        "convert": Convert,
        "train": Train,
        "doctor": Doctor,
        "bench": Bench,
        "verify": Verify,
        "tune": Tune,
        "eval": Eval,
        "inspect": Inspect,
        "fit": Fit,
    }
)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code (`command_line.run`)."""
    argv = sys.argv[1:] if argv is None else argv
    command_line.compile_without_chip()
    if argv in (["--version"], ["-V"]):
        from importlib.metadata import version

        print(f"tessera {version('tessera-attention')}")
        return 0
    if argv[:1] == ["plan"]:
        say("note: `tessera plan` is now `tessera fit`, because a plan is what `tessera calibrate` writes")
        argv = ["fit", *argv[1:]]
    command = parse(argv)
    return command_line.run(command, computes=not isinstance(command, Fetch))


def parse(argv: list[str]):
    """Parse the arguments into a command; raise SystemExit as `command_line.parse` does."""
    return command_line.parse(argv, "tessera", DESCRIPTION, COMMANDS)


def template_advice(model, prompts: list[str]) -> str:
    """Return advice to add --chat if the model has a chat template and no prompt holds its special tokens, else ""."""
    tokenizer = model.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        return ""
    names = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values() if token.special]
    if any(name in prompt for name in names for prompt in prompts):
        return ""
    return "this model has a chat template: add --chat to apply it to the prompt"


def say(*lines: str) -> None:
    for line in filter(None, lines):
        print(line, file=sys.stderr)


def parse_tokens(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"--tokens takes ids like 1,2,3, got {text!r:.60}") from None


def read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8 text ({error.reason}): convert it first") from None


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}): convert it first") from None


if __name__ == "__main__":
    sys.exit(main())
