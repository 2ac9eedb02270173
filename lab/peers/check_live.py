"""Compare with transformers live, in both directions; `make peers` runs this with Tessera's own interpreter.

The peers' environment makes fresh golden checkpoints in a temporary folder, which are checked as the tests check the
committed ones. Tessera then loads and saves each of them, and the shipped demo model; transformers' logits and token
ids of the saved folders must equal Tessera's. The exit code is 1 if logits differ by more than 1e-4, or any id.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tessera.attention.contract import Positions
from tessera.models.decoder import forward, logits
from tessera.models.files.checkpoint import load_params, save_folder
from tessera.models.files.source import open_source
from tessera.sparse.baselines import Dense

ROOT = Path(__file__).parents[2]
PEER_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
DEMO = ROOT / "src" / "tessera" / "shipped" / "model"
TEXT = "Tessera: a tile of a mosaic, “één €” 😀\n\tdef f(x):  return x"
CHAT = [
    {"role": "user", "content": "Hi <|x|> é"},
    {"role": "assistant", "content": "Ho"},
    {"role": "user", "content": "?"},
]
TOLERANCE = 1e-4

PEER = """
import json, os, sys, numpy as np, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
for folder in sys.argv[3:]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = np.load(folder + "/tokens.npy")
    with torch.no_grad():
        np.save(folder + "/logits.npy", model(torch.from_numpy(tokens)[None]).logits[0].numpy())
    if not os.path.exists(folder + "/tokenizer.json"):
        continue
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(sys.argv[1]).input_ids
    chat = tokenizer.apply_chat_template(json.loads(sys.argv[2]), add_generation_prompt=True, return_dict=False)
    json.dump([ids, tokenizer.decode(ids), chat], open(folder + "/ids.json", "w"))
"""


def our_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Compute float32 logits in one forward pass."""
    config = open_source(folder).config
    params = load_params(open_source(folder), dtype="float32", stacked=True)

    def run(params, tokens):
        length = jnp.full(1, tokens.shape[1], jnp.int32)
        positions = Positions(0 * length, length, length)
        hidden, _, _ = forward(params, tokens, None, positions, config=config, policy=Dense())
        return logits(params, hidden)

    return np.asarray(jax.jit(run)(params, tokens[None])[0])


def report(name: str, ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Print one comparison and return whether the relative error is within TOLERANCE."""
    error = float(np.max(np.abs(ours - theirs)) / np.max(np.abs(theirs)))
    print(f"{'ok  ' if error <= TOLERANCE else 'FAIL'} {name}: relative error {error:.1e}")
    return error <= TOLERANCE


def check_saved(source: Path, target: Path, tokens: np.ndarray, shard_bytes: int) -> np.ndarray:
    """Load a folder and save it through Tessera; return Tessera's logits of the saved folder."""
    config = open_source(source).config
    params = load_params(open_source(source), dtype="float32", stacked=False)
    save_folder(target, params, config, open_source(source).tokenizer, shard_bytes=shard_bytes)
    np.save(target / "tokens.npy", tokens)
    return our_logits(target, tokens)


def main() -> int:
    """Run all comparisons; return 1 if one fails."""
    held = []
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        subprocess.run([PEER_PYTHON, ROOT / "tests" / "golden" / "make.py", work / "fresh"], check=True)
        ours, saved = {}, []
        for path in sorted((work / "fresh").glob("*/expected.npz")):
            case, expected = path.parent.name, np.load(path)
            held.append(
                report(
                    f"{case}, saved by transformers", our_logits(path.parent, expected["tokens"]), expected["logits"]
                )
            )
            ours[case] = check_saved(path.parent, work / case, expected["tokens"], 1 << (14 if len(ours) % 2 else 30))
            saved.append(work / case)
        if (DEMO / "config.json").is_file():
            tokens = np.asarray(open_source(DEMO).tokenizer.encode(TEXT * 4), np.int64)
            ours["demo"] = check_saved(DEMO, work / "demo", tokens, 1 << 30)
            saved.append(work / "demo")
        command = [PEER_PYTHON, "-c", PEER, TEXT, json.dumps(CHAT), *saved]
        subprocess.run(command, check=True)
        for folder in saved:
            held.append(report(f"{folder.name}, saved by Tessera", ours[folder.name], np.load(folder / "logits.npy")))
            if (tokenizer := open_source(folder).tokenizer) is None:
                continue
            ids, text, chat = json.loads((folder / "ids.json").read_text())
            same = (tokenizer.encode(TEXT), tokenizer.decode(ids, skip_special=False), tokenizer.encode_chat(CHAT))
            held.append(same == (ids, text, chat))
            print(f"{'ok  ' if held[-1] else 'FAIL'} {folder.name}: token ids, text and chat ids")
    print(f"{sum(held)} of {len(held)} comparisons hold")
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
