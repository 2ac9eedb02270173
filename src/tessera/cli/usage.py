"""Errors for an unknown command or flag: each names what to use instead, or the nearest known name."""

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import takewhile
from types import MappingProxyType
from typing import Annotated, get_args, get_origin, get_type_hints

import tyro

COMMANDS = MappingProxyType(
    {
        "run": "generate answers a prompt, chat converses",
        "complete": "generate answers a prompt",
        "completion": "generate answers a prompt",
        "llama-cli": "generate answers a prompt, chat converses",
        "server": "serve answers over HTTP",
        "llama-server": "serve answers over HTTP",
        "pull": "fetch downloads a model",
        "download": "fetch downloads a model",
        "perplexity": "eval judges a plan, calibrate measures what a plan loses",
        "quantize": "use `tessera generate --weights int8`, which rounds the weights in memory and writes no file",
        "version": "--version shows it",
        **{
            name: f"run `python -m lab {name}` in a checkout of the repository"
            for name in ("demo", "report", "simulate", "study")
        },
        "load": "GuideLLM (`guidellm run`) measures a running server, see docs/serving-figures.md",
    }
)
"""Commands of llama.cpp, vLLM and transformers, and former ones of ours, each with what to use instead."""

_CONTEXT = "the cache grows with the request, up to the model's context: drop it"
_DEVICE = "JAX takes the accelerator that it finds: drop it, or set JAX_PLATFORMS=cpu"
_MEMORY = "batch rows and memory are allocated as needed: drop it"
_KERNEL = "the device decides which kernels run, as `tessera doctor` shows: drop it"
_CACHE = "keys and values have the dtype of the weights: drop it, or use --kv-dtype int8"
_WEIGHTS = "use --weights, which takes int8, int4, fp8 and gguf"
_CHAT = "use `tessera chat`"
_DRAWS = "sampling has --temperature, --top-k, --top-p, --min-p and penalties (--repetition-penalty, ...): drop it"
_FREE = "only `tessera serve` takes a schema for its answers, in response_format: drop it"
_PLAIN = "only the answer is printed, as plain text: drop it"
_SERVER = "use `tessera serve`"
_SPECIAL = "use --chat, which applies the model's own template"

FLAGS = MappingProxyType(
    {
        **dict.fromkeys(("-c", "--ctx-size", "--max-model-len", "--max-seq-len"), _CONTEXT),
        **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers", "--device", "--device-map"), _DEVICE),
        **dict.fromkeys(("-t", "--threads"), "JAX uses every core: drop it, or start the command under taskset"),
        **dict.fromkeys(("-tp", "--tensor-parallel-size"), "use --mesh"),
        **dict.fromkeys(("-b", "--batch-size", "-ub", "--ubatch-size", "--gpu-memory-utilization"), _MEMORY),
        **dict.fromkeys(
            ("-fa", "--flash-attn", "--attn-implementation", "--attention-backend", "--enforce-eager"), _KERNEL
        ),
        **dict.fromkeys(("-ctk", "-ctv", "--cache-type-k", "--cache-type-v", "--kv-cache-dtype"), _CACHE),
        **dict.fromkeys(("-q", "--quantization", "--load-in-4bit", "--load-in-8bit"), _WEIGHTS),
        **dict.fromkeys(("-hf", "--hf-repo", "--model-id", "--model-name-or-path"), "use --model, which takes hub ids"),
        **dict.fromkeys(("-cnv", "--conversation", "-i", "--interactive"), _CHAT),
        **dict.fromkeys(("-no-cnv", "--no-conversation", "-st", "--single-turn"), "use `tessera generate`"),
        **dict.fromkeys(("-sys", "--system", "--system-prompt"), f"{_CHAT}, which has --system"),
        **dict.fromkeys(("-p", "--prompt"), "use `tessera generate`, or type it in `tessera chat`"),
        **dict.fromkeys(("-r", "--reverse-prompt"), "use --stop of `tessera generate`"),
        **dict.fromkeys(("-v", "--verbose"), "use --debug, which shows the traceback of an error"),
        **dict.fromkeys(("-o", "--output", "--output-dir"), "use --out in commands that write files"),
        "--do-sample": "a --temperature above 0 samples: drop it",
        "--num-beams": "there is no beam search: drop it",
        "--max-length": "use --max-new-tokens, which does not count the prompt",
        "--tokenizer": "the tokenizer comes with the model: drop it",
        "--torch-dtype": "use --dtype",
        "--trust-remote-code": "code that comes with a model never runs: drop it",
        **dict.fromkeys(("-V", "--version"), "use `tessera --version`"),
        **dict.fromkeys(("--host", "--port", "--served-model-name", "--enable-prefix-caching"), _SERVER),
        **dict.fromkeys(("--mirostat", "--typical", "--samplers", "--repeat-last-n", "--logit-bias"), _DRAWS),
        "--no-repeat-ngram-size": _DRAWS,
        **dict.fromkeys(("-j", "--json-schema", "--grammar", "--grammar-file", "--guided-json"), _FREE),
        **dict.fromkeys(("--mlock", "--no-mmap", "--numa", "--swap-space", "--max-num-seqs"), _MEMORY),
        **dict.fromkeys(("--color", "--log-disable", "--no-display-prompt", "--simple-io", "-sp", "--special"), _PLAIN),
        **dict.fromkeys(("--chat-template", "--jinja", "--in-prefix", "--in-suffix"), _SPECIAL),
        **dict.fromkeys(("-mli", "--multiline-input"), f"{_CHAT}, where a line that ends with \\ continues"),
        **dict.fromkeys(("-hff", "--hf-file"), "download the file and pass its path to --model"),
        **dict.fromkeys(("-e", "--escape"), "drop it, and type the characters themselves, or use the shell's $'...'"),
        **dict.fromkeys(("-pp", "--pipeline-parallel-size"), "layers are not spread over devices: drop it"),
        **dict.fromkeys(("--keep", "--context-shift"), "the whole conversation stays in the context: drop it"),
        "--ignore-eos": "an answer ends at the model's end token: drop it",
        "--lora": "adapters do not load: merge the adapter into the weights first",
        "--num-return-sequences": "each prompt gets one answer: run again with another --seed",
    }
)
"""Flags of llama-cli, vLLM and transformers that have another name here, or none, each with what to do instead."""

_HALF = "float16 weights are not supported: use bfloat16"
DTYPES = MappingProxyType(
    {"half": _HALF, "float16": _HALF, "fp16": _HALF, "f16": _HALF}
    | {"bf16": "use bfloat16"}
    | dict.fromkeys(("fp32", "f32", "float"), "use float32")
)
"""Names of dtypes in other tools, each with what to use instead."""


def unknown_command(word: str, commands: Iterable[str], prog: str) -> str:
    if word.startswith("-"):
        return f"{prog} takes a command before its flags, such as {prog} generate {word} ... {_listed(prog)}"
    return f"{prog} has no command {word}{_instead(word, COMMANDS, commands)} {_listed(prog)}"


def unknown_flag(words: Sequence[str], known: Sequence[str], prog: str) -> str | None:
    """Return the error for the first word that looks like a flag but is not `known`; None if all flags are known.
    tyro's own check would report missing flags first, and would parse -ngl as -n gl."""
    for word in takewhile(lambda word: word != "--", words):
        name = word.partition("=")[0].replace("_", "-")
        joined = name[:2] in known and name not in FLAGS  # a value joined to a short flag, as in -n3
        letters = joined and not re.fullmatch("-[A-Za-z]{2,4}", name)  # but -xyz is a flag of another tool
        if re.match("--?[A-Za-z]", word) and name not in known and not letters:
            return f"{prog} has no flag {name}{_instead(name, FLAGS, known)} {_listed(prog)}"
    return None


def wrong_dtype(words: Sequence[str], prog: str) -> str | None:
    """Return the error if the value of --dtype is a key of DTYPES, a name that other tools use; else None."""
    for index, word in enumerate(words):
        flag, _, value = word.partition("=")
        value = value or next(iter(words[index + 1 :]), "")
        if flag == "--dtype" and value in DTYPES:
            return f"{prog} has no --dtype {value}: {DTYPES[value]} {_listed(prog)}"
    return None


def extra_words(words: Sequence[str], prog: str) -> str:
    return f"{prog} takes no further argument, but got {words[0]!r}: put quotes around text with spaces {_listed(prog)}"


def flags(kind: type) -> list[str]:
    """List the flags of a command, with their aliases."""
    found = ["-h", "--help"]
    for name, hint in get_type_hints(kind, include_extras=True).items():
        given = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        if tyro.conf.Positional in given:
            continue
        own = next((mark.name for mark in given if getattr(mark, "name", None)), name)
        found.append("--" + own.replace("_", "-"))
        found += [alias for mark in given for alias in getattr(mark, "aliases", None) or ()]
    return found


def _instead(word: str, elsewhere: Mapping[str, str], known: Iterable[str]) -> str:
    if word in elsewhere:
        return f": {elsewhere[word]}"
    near = get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f": did you mean {near[0]}?" if near else ""


def _listed(prog: str) -> str:
    return f"(see {prog} --help)"
