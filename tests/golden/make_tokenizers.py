"""Make tokenizers.json: small vocabularies, texts, and the token ids that other implementations give them.

    python tests/golden/make_tokenizers.py

Run with Tessera's own interpreter after `make peers`. Tokenizers and sentencepiece, in the peers' environment, train
the vocabularies on the shipped document. Each vocabulary is written as a GGUF file, from which llama.cpp (xllamacpp)
tokenizes the texts; transformers' tokenizer classes and sentencepiece give a second set of ids.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import tokenizers
from gguf_files import bpe_metadata, spm_metadata, tiny_model, write_gguf
from tokenizers import models, pre_tokenizers, trainers

ROOT = Path(__file__).parents[2]
PEER_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
DOCUMENT = ROOT / "lab" / "demo" / "document.txt"
OUT = Path(__file__).parent / "tokenizers.json"
PRE = ("gpt-2", "default", "smollm", "qwen2", "llama-bpe")
TEXTS = [
    "Hello world",
    " leading space, trailing space ",
    "They're sure we'll say I'M HERE'S it'd've",
    "12345678 and 3.14159, 1,000,000; x2y33z444",
    "tabs\t\tand\nnew\r\nlines\n\n\n  indented\n",
    "    four spaces    between    words",
    "def f(x):\n    return x**2 + y[0] != {'a': 1}  # ok",
    "a+b=c <tag> ~^| $5 && || == <= >=",
    "naïve café Ärger déjà-vu Ελληνικά русский язык",
    "日本語のテキスト、中文字符 한국어",
    "emoji 😀👍🏽 and ½ ² Ⅷ ٣",
    "<|im_start|>user\nhi<|im_end|>\n<s>x</s>",
    "\u00a0non\u2003breaking\u200bzero",
    "!!!...???---***",
]
CUT_PRE = (
    "gpt-2 default smollm falcon qwen2 llama-bpe seed-coder tekken gpt-4o deepseek-coder deepseek-v3 bloom viking "
    "deepseek-r1-qwen smaug-bpe deepseek-llm"
).split()
CUT_TEXTS = [
    *(text for text in TEXTS if "</s>" not in text and "\u2003" not in text),
    "camelCase HTTPServer iPhone's McDonald'S ÉcoleNormale /usr/bin\n//x\r\n a/b)\n(c)\n\n",
    "`code` x=1234567.89;y+=2 a.b.c 'tis o'clock we'Re $x `",
    "한국어123日本12,345語 \n 。、a،b (c|d) e|f",
]
"""Texts on which llama.cpp's translations of the regular expressions agree with the originals: without rare spaces and
combining characters, and without "</s>", which llama.cpp takes as a special token whatever its type."""
DECOMPOSED = "cafe\u0301 A\u030angstro\u0308m"
"""Text that is not in NFC: qwen2's own tokenizer composes its characters, llama.cpp does not."""

TRAIN = r"""
import json, sys, io
import sentencepiece, tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import GPT2Tokenizer, Qwen2Tokenizer
text = open(sys.argv[1], encoding="utf-8").read()[:200_000]
texts, decomposed = json.loads(sys.argv[2]), sys.argv[3]
backend = tokenizers.Tokenizer(models.BPE())
backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=specials, show_progress=False,
                              initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
# merges of digits and of punctuation must exist, or the cuts between them would not show
extra = [" ".join(str(n) for n in range(2000)) * 20, "they're we'll 's == ... (x)\n\n  a\n !!! --- x\n)\n" * 500]
backend.train_from_iterator([text, *extra], trainer)
model = json.loads(backend.to_str())["model"]
tokens = sorted(model["vocab"], key=model["vocab"].get)
merges = [" ".join(merge) for merge in model["merges"]]
bpe = {"tokens": tokens, "types": [3] * 3 + [1] * (len(tokens) - 3), "merges": merges}
pairs = [tuple(merge) for merge in model["merges"]]
gpt2 = GPT2Tokenizer(vocab=model["vocab"], merges=pairs, unk_token="<|endoftext|>", eos_token="<|endoftext|>")
qwen2 = Qwen2Tokenizer(vocab=model["vocab"], merges=pairs)
for one in (gpt2, qwen2):
    one.add_tokens(specials, special_tokens=True)

out = io.BytesIO()
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(text.splitlines()), model_writer=out, vocab_size=900, model_type="bpe", byte_fallback=True,
    split_digits=True, normalization_rule_name="identity", remove_extra_whitespaces=False, unk_id=0, bos_id=1, eos_id=2,
    minloglevel=2, allow_whitespace_only_pieces=True)
piece = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
count = piece.get_piece_size()
kinds = [2 if piece.is_unknown(i) else 3 if piece.is_control(i) else 6 if piece.is_byte(i) else 1 for i in range(count)]
spm = {"tokens": [piece.id_to_piece(i) for i in range(count)], "types": kinds,
       "scores": [piece.get_score(i) for i in range(count)]}
plain = [text for text in texts if "<s>" not in text]
own = {
    "gpt-2": [gpt2.encode(text, add_special_tokens=False) for text in texts],
    "qwen2": [qwen2.encode(text, add_special_tokens=False) for text in [*texts, decomposed]],
    "sentencepiece": [piece.encode(text, out_type=int) for text in plain],
}
json.dump({"bpe": bpe, "spm": spm, "own": own}, sys.stdout)
"""

TOKENIZE = r"""
import json, sys, urllib.request
import xllamacpp
texts, found = json.loads(sys.argv[1]), {}
for path in sys.argv[2:]:
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = path, 512, 1, False
    server = xllamacpp.Server(params)
    def ask(text):
        body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(server.listening_address + "/tokenize", body, kind)
        return json.load(urllib.request.urlopen(request))["tokens"]
    found[path.rsplit("/", 1)[1].removesuffix(".gguf")] = [ask(text) for text in texts]
    del server
json.dump(found, sys.stdout)
"""


def peer(program: str, *arguments) -> dict:
    """Run a program in the peers' environment and parse the JSON that it prints."""
    done = subprocess.run([PEER_PYTHON, "-c", program, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def llama_cpp_ids(work: Path, bpe: dict, spm: dict, texts: list[str]) -> dict[str, list[list[int]]]:
    """Return llama.cpp's ids of the texts, by pre-tokenizer, and under "sentencepiece" for that vocabulary."""
    metadata, tensors = tiny_model(len(bpe["tokens"]))
    paths = [write_gguf(work / f"{pre}.gguf", metadata | bpe_metadata(bpe, pre), tensors) for pre in PRE]
    metadata, tensors = tiny_model(len(spm["tokens"]))
    paths.append(write_gguf(work / "sentencepiece.gguf", metadata | spm_metadata(spm), tensors))
    return peer(TOKENIZE, json.dumps(texts), *paths)


def cut_vocabulary() -> dict:
    """Train a BPE on all short substrings of CUT_TEXTS, so that its ids show where a pre-tokenizer cuts."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=3000, show_progress=False, initial_alphabet=alphabet)
    parts = (text[at : at + size] for text in CUT_TEXTS for size in range(2, 9) for at in range(len(text) - size + 1))
    backend.train_from_iterator(parts, trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {"tokens": tokens, "types": [1] * len(tokens), "merges": [" ".join(merge) for merge in model["merges"]]}


def cut_ids(work: Path, vocab: dict) -> dict[str, list[list[int]]]:
    """Return llama.cpp's ids of CUT_TEXTS, by pre-tokenizer."""
    metadata, tensors = tiny_model(len(vocab["tokens"]))
    paths = [write_gguf(work / f"{pre}.gguf", metadata | bpe_metadata(vocab, pre), tensors) for pre in CUT_PRE]
    return peer(TOKENIZE, json.dumps(CUT_TEXTS), *paths)


def main() -> None:
    """Train the vocabularies, collect all ids and write tokenizers.json."""
    made = peer(TRAIN, DOCUMENT, json.dumps(TEXTS), DECOMPOSED)
    cuts = cut_vocabulary()
    with tempfile.TemporaryDirectory() as work:
        made["llama_cpp"] = llama_cpp_ids(Path(work), made["bpe"], made["spm"], TEXTS)
        made["cuts"] = {"vocabulary": cuts, "texts": CUT_TEXTS, "ids": cut_ids(Path(work), cuts)}
    made |= {"texts": TEXTS, "decomposed": DECOMPOSED}
    OUT.write_text(json.dumps(made, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
