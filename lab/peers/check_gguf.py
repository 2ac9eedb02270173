"""SmolLM2's GGUF against transformers and llama.cpp, live: `make peers` runs this with Tessera's own interpreter.

The file is fetched (`tessera fetch smollm2`), loaded, and converted to a Hugging Face folder. transformers reads the
folder: its logits of ten passages must be Tessera's logits of the GGUF within 1e-4 of their range, its token ids and
rendered conversations the same. llama.cpp (xllamacpp) reads the GGUF itself and chooses the next token after each of
100 prefixes. It rounds activations to 8 bits, and keys and values to 16, which decides near ties; so it also reads the
same weights as an F32 file, with F32 keys and values. There it must choose Tessera's token after every prefix; on the
file itself a token may differ where Tessera's margin is smaller than what llama.cpp's rounding moves its own
log-probabilities. Appends three records to evidence/real-DEVICE.jsonl; exit status 1 if a check fails.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from gguf_files import Q, write_gguf

import tessera
from tessera.core import hardware
from tessera.measure import evidence
from tessera.measure.evidence import What

ROOT = Path(__file__).parents[2]
PEER_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
PROSE = (ROOT / "lab" / "demo" / "document.txt", ROOT / "LICENSE")
ODD = ROOT / "tests" / "golden" / "tokenizers.json"
TOLERANCE = 1e-4
PASSAGES, TOKENS, CUTS = 10, 200, tuple(range(19, 200, 20))
"""Number of passages, tokens per passage, and the prefix lengths after which llama.cpp chooses the next token."""
CHATS = [
    [{"role": "user", "content": "Hi <|x|> é 😀"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1 = ?\n"}],
    [
        {"role": "user", "content": "Ho"},
        {"role": "assistant", "content": " yes "},
        {"role": "user", "content": "<|im_end|>"},
    ],
]
COMMAND = "make peers"

TRANSFORMERS = """
import json, sys, numpy as np, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
folder, asked = sys.argv[1], json.load(open(sys.argv[2]))
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
with torch.no_grad():
    logits = [model(torch.tensor([row])).logits[0].numpy() for row in asked["tokens"]]
np.save(sys.argv[3], np.stack(logits))
chats = [tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=False) for c in asked["chats"]]
ids = [tokenizer(text).input_ids for text in asked["texts"]]
json.dump({"ids": ids, "text": [tokenizer.decode(i) for i in ids], "chats": chats,
           "chat_ids": [tokenizer(c, add_special_tokens=False).input_ids for c in chats]}, sys.stdout)
"""

LLAMA_CPP = """
import json, sys
import xllamacpp
asked = json.load(open(sys.argv[2]))
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel = sys.argv[1], 512, 1
params.cpuparams.n_threads = 1
if sys.argv[3] == "exact":
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server, best = xllamacpp.Server(params), []
for row in asked["tokens"]:
    for cut in asked["cuts"]:
        request = {"prompt": row[:cut], "n_predict": 1, "temperature": 0, "n_probs": 10}
        answer = server.handle_completions(request)
        [place] = answer["choices"][0]["logprobs"]["content"]
        best.append([(one["id"], one["logprob"]) for one in place["top_logprobs"]])
json.dump(best, sys.stdout)
"""


def peer(program: str, *arguments: str | Path) -> dict | list:
    """Run a program in the peers' environment and parse the JSON that it prints."""
    command = [PEER_PYTHON, "-c", program, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return json.loads(done.stdout)


def passages(tokenizer) -> tuple[list[str], np.ndarray]:
    """Return texts for tokenizers, odd ones included, and the first tokens of each passage [PASSAGES, TOKENS]."""
    prose = "".join(path.read_text(encoding="utf-8") for path in PROSE)
    starts = np.linspace(0, len(prose) - 1500, PASSAGES).astype(int)
    texts = [prose[start : start + 1500] for start in starts]
    odd = json.loads(ODD.read_text(encoding="utf-8"))["texts"]
    return [*texts, *odd], np.array([tokenizer.encode(text)[:TOKENS] for text in texts])


def against_transformers(model, folder: Path, texts: list[str], tokens: np.ndarray, ours: np.ndarray, asked: Path):
    """Compare logits, tokens and templates with transformers on a saved folder; return (record, passes)."""
    tessera.save(model, folder)
    answer = peer(TRANSFORMERS, folder, asked, folder / "logits.npy")
    theirs = np.load(folder / "logits.npy")
    ranges = theirs.max(axis=(1, 2)) - theirs.min(axis=(1, 2))
    errors = np.abs(ours - theirs).max(axis=(1, 2)) / ranges
    tokenizer = model.tokenizer
    ids = [tokenizer.encode(text) for text in texts]
    rendered = [tokenizer.render_chat(chat) for chat in CHATS]
    same_ids = answer["ids"] == ids and answer["chat_ids"] == [tokenizer.encode_chat(chat) for chat in CHATS]
    same_text = answer["text"] == [tokenizer.decode(row, skip_special=False) for row in ids]
    facts = {
        "max_error": float(errors.max()),
        "target": TOLERANCE,
        "positions": int(tokens.size),
        "same_best": float((ours.argmax(-1) == theirs.argmax(-1)).mean()),
        "same_tokens": same_ids and same_text,
        "same_template": answer["chats"] == rendered,
    }
    held = bool(errors.max() <= TOLERANCE and facts["same_tokens"] and facts["same_template"])
    what = What(
        op="gguf fidelity",
        kernel="dense",
        workload="transformers",
        dtype="float32",
        title="SmolLM2-135M-Instruct Q4_1: largest difference of logits from transformers' on the converted folder, "
        "over their range",
    )
    return evidence.make(what, errors, command=COMMAND, unit="fraction", facts=facts), held


def write_exact(path: Path, target: Path) -> Path:
    """Write the same weights as an F32 file, dequantised by the gguf package."""
    reader = gguf.GGUFReader(path)
    metadata = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    metadata["general.file_type"] = 0
    floats = {t.name: (gguf.dequantize(t.data, t.tensor_type), Q.F32) for t in reader.tensors}
    return write_gguf(target, metadata, floats)


def against_llama_cpp(path: Path, exact: Path, ours: np.ndarray, asked: Path) -> list[tuple[evidence.Record, bool]]:
    """Compare next tokens with llama.cpp, on the file and on its weights in F32; return two (record, passes)."""
    rows = np.stack([ours[i, cut - 1] for i in range(PASSAGES) for cut in CUTS])
    ours = (
        rows - np.log(np.exp(rows - rows.max(-1, keepdims=True)).sum(-1, keepdims=True)) - rows.max(-1, keepdims=True)
    )
    answers = {"exact": peer(LLAMA_CPP, exact, asked, "exact"), "own": peer(LLAMA_CPP, path, asked, "own")}
    scores = {name: [dict(map(tuple, best)) for best in answer] for name, answer in answers.items()}
    # Rounding moves the difference of two log-probabilities by up to twice what it moves one of them.
    moved = [abs(a[t] - b[t]) for a, b in zip(*scores.values()) for t in a.keys() & b.keys() if a[t] > -5]
    rounding = 2 * max(moved)
    found = []
    for name, words in (("own", "the file itself"), ("exact", "its weights in F32")):
        margins = []
        for row, best in zip(ours, answers[name]):
            if int(row.argmax()) != best[0][0]:
                margins.append(float(row.max() - row[best[0][0]]))
        errors = [abs(row[t] - lp) for row, best in zip(ours, answers[name]) for t, lp in map(tuple, best) if lp > -5]
        facts = {"prefixes": len(rows), "same_best": len(rows) - len(margins), "our_margins_where_not": margins}
        facts |= {"max_log_probability_error": float(max(errors)), "its_own_rounding": rounding}
        what = What(
            op="gguf fidelity",
            kernel="dense",
            workload=f"llama_cpp_{name}",
            dtype="float32",
            title=f"SmolLM2-135M-Instruct Q4_1, {words}: prefixes after which llama.cpp chooses the same next token",
        )
        share = facts["same_best"] / len(rows)
        held = all(margin < rounding for margin in margins) if name == "own" else not margins
        found.append((evidence.make(what, [share], command=COMMAND, unit="fraction", facts=facts), held))
    return found


def main() -> int:
    """Run the comparisons, then print and store their records; return 1 if one fails."""
    path = tessera.fetch("smollm2")
    model = tessera.load(path)
    texts, tokens = passages(model.tokenizer)
    ours = np.concatenate([np.asarray(model.logits(row[None])) for row in tokens])
    with tempfile.TemporaryDirectory() as name:
        asked = Path(name) / "asked.json"
        asked.write_text(json.dumps({"texts": texts, "tokens": tokens.tolist(), "cuts": CUTS, "chats": CHATS}))
        found = [
            against_transformers(model, Path(name) / "folder", texts, tokens, ours, asked),
            *against_llama_cpp(path, write_exact(path, Path(name) / "exact.gguf"), ours, asked),
        ]
    for record, held in found:
        print(f"{'ok  ' if held else 'FAIL'} {record.what.workload}: {json.dumps(record.facts)}")
    evidence.append(ROOT / "evidence" / f"real-{hardware.device_slug()}.jsonl", [record for record, _ in found])
    return 0 if all(held for _, held in found) else 1


if __name__ == "__main__":
    sys.exit(main())
