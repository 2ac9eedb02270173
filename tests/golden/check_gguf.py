"""SmolLM2's GGUF against transformers and llama.cpp, live: `make peers` runs this with Tessera's own interpreter.

The file is fetched (`tessera fetch smollm2`), loaded, and converted to a Hugging Face folder. transformers reads the
folder: its logits of ten passages must be Tessera's logits of the GGUF within 1e-4 of their range, its token ids and
rendered conversations the same. llama.cpp (xllamacpp) reads the GGUF itself: it must choose the same next token after
each of 100 prefixes. llama.cpp rounds activations to 8 bits, so its logits differ by more. Appends two records to
evidence/real-DEVICE.jsonl; exit status 1 if anything differs.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import tessera
from tessera import evidence
from tessera.evidence import How, What

ROOT = Path(__file__).parents[2]
PEER_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
DOCUMENT = ROOT / "src" / "tessera" / "demo" / "document.txt"
TOLERANCE = 1e-4
PASSAGES, TOKENS, CUTS = 10, 200, tuple(range(19, 200, 20))
"""Passages of the shipped document, tokens of each, and the tokens after which llama.cpp is asked for the next one."""
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
server, best = xllamacpp.Server(params), []
for row in asked["tokens"]:
    for cut in asked["cuts"]:
        request = {"prompt": row[:cut], "n_predict": 1, "temperature": 0, "n_probs": 2}
        answer = server.handle_completions(request)
        [place] = answer["choices"][0]["logprobs"]["content"]
        best.append([(one["id"], one["logprob"]) for one in place["top_logprobs"]])
json.dump(best, sys.stdout)
"""


def peer(program: str, *arguments: str | Path) -> dict | list:
    """What a program of the peers' environment prints, as JSON."""
    command = [PEER_PYTHON, "-c", program, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return json.loads(done.stdout)


def passages(tokenizer) -> tuple[list[str], np.ndarray]:
    """Texts from all over the document, and the first tokens of each [PASSAGES, TOKENS]."""
    document = DOCUMENT.read_text(encoding="utf-8")
    starts = np.linspace(0, len(document) - 4000, PASSAGES).astype(int)
    texts = [document[start : start + 2000] for start in starts]
    return texts, np.array([tokenizer.encode(text)[:TOKENS] for text in texts])


def against_transformers(model, folder: Path, texts: list[str], tokens: np.ndarray, ours: np.ndarray, asked: Path):
    """One record; whether it holds."""
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
    return evidence.make(
        what, errors, command=COMMAND, how=How(iterations=PASSAGES), unit="fraction", facts=facts
    ), held


def against_llama_cpp(path: Path, tokens: np.ndarray, ours: np.ndarray, asked: Path):
    """One record; whether it holds."""
    answer = peer(LLAMA_CPP, path, asked)
    rows = [ours[i, cut - 1] for i in range(PASSAGES) for cut in CUTS]
    same = [int(row.argmax()) == best[0][0] for row, best in zip(rows, answer)]
    pairs = [(np.sort(row)[-2:], best) for row, best, equal in zip(rows, answer, same) if not equal]
    facts = {
        "prefixes": len(rows),
        "same_best": sum(same),
        "margins_where_not": [float(top[1] - top[0]) for top, _ in pairs],
        "their_margins_where_not": [best[0][1] - best[1][1] for _, best in pairs],
    }
    what = What(
        op="gguf fidelity",
        kernel="dense",
        workload="llama_cpp",
        dtype="float32",
        title="SmolLM2-135M-Instruct Q4_1: prefixes after which llama.cpp chooses the same next token",
    )
    record = evidence.make(what, [sum(same) / len(same)], command=COMMAND, unit="fraction", facts=facts)
    return record, all(same)


def main() -> int:
    """Run both comparisons, print and store them."""
    path = tessera.fetch("smollm2")
    model = tessera.load(path)
    texts, tokens = passages(model.tokenizer)
    ours = np.concatenate([np.asarray(model.logits(row[None])) for row in tokens])
    with tempfile.TemporaryDirectory() as name:
        asked = Path(name) / "asked.json"
        asked.write_text(json.dumps({"texts": texts, "tokens": tokens.tolist(), "cuts": CUTS, "chats": CHATS}))
        found = [
            against_transformers(model, Path(name) / "folder", texts, tokens, ours, asked),
            against_llama_cpp(path, tokens, ours, asked),
        ]
    for record, held in found:
        print(f"{'ok  ' if held else 'FAIL'} {record.what.workload}: {json.dumps(record.facts)}")
    evidence.append(ROOT / "evidence" / f"real-{evidence.device_slug()}.jsonl", [record for record, _ in found])
    return 0 if all(held for _, held in found) else 1


if __name__ == "__main__":
    sys.exit(main())
