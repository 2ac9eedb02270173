"""Reading GGUF files: every type and architecture against the float checkpoint; loads and commands."""

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import jax
import numpy as np
import pytest
from gguf_files import Q, from_folder, interleave, llama3_factors, small_file, tiny_model, write_gguf
from safetensors.numpy import load_file
from test_models import CASES, GOLDEN, load_case, relative_error, whole_logits
from tiny import CONFIG, PLAN, random_params, save_tiny

import tessera
from tessera.cli import processes as cli_processes
from tessera.cli import train as cli_train
from tessera.cli.main import main
from tessera.generate import plan_path
from tessera.models.config import Rope
from tessera.models.files import gguf_file
from tessera.models.files.checkpoint import fingerprint, load_params, save_folder
from tessera.models.files.gguf_file import TYPES, order_of_rows
from tessera.models.files.source import open_source, resolve

SAYABLE = [name for name in CASES if name != "rope_yarn_mscale"]  # GGUF has no key for its magnitude scales


def same(a, b) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


def refusal(path: Path) -> str:
    """Return the sentence with which loading the file is refused."""
    with pytest.raises(ValueError) as caught:
        tessera.load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Architectures


@pytest.mark.parametrize("name", SAYABLE)
def test_a_file_is_its_folder(tmp_path, name):
    """A float GGUF loads as its golden folder does: names, row order, biases, norms, rope scaling and windows."""
    path = from_folder(GOLDEN / name, tmp_path / "x.gguf")
    config, params, tokens, theirs = load_case(name, stacked=True)
    ours = open_source(path).config
    assert ours == replace(config, dtype="float32", family=ours.family)
    loaded = load_params(open_source(path), stacked=True)
    assert same(loaded, params)
    if name == "llama3":
        assert relative_error(whole_logits(loaded, tokens[None], config=ours)[0], theirs) <= 1e-4


def test_families():
    assert {open_source(GOLDEN / name).config.family for name in SAYABLE} == {"llama", "mistral", "qwen2", "qwen3"}
    assert {open_source(GOLDEN / name).config.rope.kind for name in SAYABLE} == {"default", "linear", "llama3", "yarn"}


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_a_llama_with_a_window_is_a_mistral(tmp_path, architecture):
    config = open_source(from_folder(GOLDEN / "mistral_window", tmp_path / "x.gguf", architecture=architecture)).config
    assert (config.family, config.window) == ("mistral", 12)


def test_order_of_rows_undoes_the_converters():
    rows = np.arange(48).reshape(24, 2)
    out = np.empty_like(rows)
    out[order_of_rows(24, 3)] = interleave(rows, 3)
    assert np.array_equal(out, rows)
    assert not np.array_equal(interleave(rows, 3), rows)


@pytest.mark.parametrize("factor", [2.0, 8.0, 32.0])
@pytest.mark.parametrize(("theta", "head_dim"), [(5e5, 128), (5e5, 64), (1e4, 96)])
@pytest.mark.parametrize(("context", "low", "high"), [(8192, 1.0, 4.0), (4096, 1.0, 8.0), (8192, 2.0, 8.0)])
def test_llama3_factors_are_inverted(tmp_path, factor, theta, head_dim, context, low, high):
    rope = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high, "rope_theta": theta}
    factors = llama3_factors(rope | {"original_max_position_embeddings": context}, head_dim)
    config = open_source(rope_file(tmp_path, factors, theta, head_dim)).config
    expected = Rope(
        kind="llama3",
        theta=theta,
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=high / low,
        original_max_positions=int(context / low),
    )
    assert config.rope == expected


def rope_file(tmp_path: Path, factors: np.ndarray, theta: float, head_dim: int) -> Path:
    metadata, tensors = tiny_model(64, hidden=2 * head_dim)
    metadata["llama.rope.freq_base"] = theta
    return write_gguf(tmp_path / "x.gguf", metadata, tensors | {"rope_freqs.weight": (factors, Q.F32)})


def test_factors_that_are_not_llama3s_are_refused(tmp_path):
    factors = np.linspace(1, 8, 32, dtype=np.float32)
    assert "rope_freqs.weight" in refusal(rope_file(tmp_path, factors, 5e5, 64))
    assert "rope_freqs.weight" in refusal(rope_file(tmp_path, factors[:8], 5e5, 64))
    assert "not finite" in refusal(rope_file(tmp_path, factors * np.float32(np.nan), 5e5, 64))
    assert open_source(rope_file(tmp_path, np.ones(32, np.float32), 5e5, 64)).config.rope == Rope(theta=5e5)


# Types


WRITABLE = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 TQ1_0 TQ2_0 MXFP4".split()
OTHERS = "IQ4_NL IQ4_XS IQ3_S IQ3_XXS IQ2_S IQ2_XS IQ2_XXS IQ1_S IQ1_M TQ1_0 TQ2_0 MXFP4 NVFP4".split()
"""Types that the gguf package dequantises and TYPES does not list."""


def encode(name: str, array: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    """Encode a matrix in this type; a type that the gguf package cannot write gets random values with small scales."""
    kind = Q[name]
    if name in WRITABLE:
        return gguf.quantize(array, kind), kind
    values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(array.size)
    blocks = rng.integers(0, 256, (array.size // values, num_bytes), dtype=np.uint8)
    scales = rng.uniform(0.001, 0.01, (len(blocks), 2)).astype(np.float16).view(np.uint8).reshape(len(blocks), 4)
    if name == "IQ1_M":  # the scale's bits are spread over the last eight bytes
        blocks[:, -1] = blocks[:, -1] & 15 | 0x20
        return blocks.reshape(array.shape[0], -1), kind
    if name == "NVFP4":  # four float8 scales
        blocks[:, :4] &= 0x3F
        return blocks.reshape(array.shape[0], -1), kind
    at_end = {"Q2_K": 4, **dict.fromkeys(("Q3_K", "Q6_K"), 2)}
    where = slice(-at_end[name], None) if name in at_end else slice(0, 4 if name in ("Q4_K", "Q5_K") else 2)
    blocks[:, where] = scales[:, : blocks[:, where].shape[1]]
    return blocks.reshape(array.shape[0], -1), kind


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((layout.name, dtype) for layout in TYPES.values() for dtype in ("float32", "bfloat16")),
        *((name, "float32") for name in OTHERS),
    ],
)
def test_every_type_equals_the_float_checkpoint(tmp_path, name, dtype):
    """The oracle dequantises whole tensors, reorders q's and k's rows itself, and saves safetensors."""
    metadata, tensors = tiny_model(300, hidden=256)
    stored, floats = {}, {}
    for key, (array, _) in tensors.items():
        data, kind = encode(name, array) if array.ndim == 2 else (array, Q.F32)
        stored[key] = data, kind
        floats[key] = gguf.dequantize(data, kind).reshape(array.shape), Q.F32
    quantised = write_gguf(tmp_path / "q.gguf", metadata, stored)
    plain = write_gguf(tmp_path / "f.gguf", metadata, floats)
    config, float_config = open_source(quantised).config, open_source(plain).config
    assert config == replace(float_config, dtype="bfloat16" if name == "BF16" else "float32")
    ours = load_params(open_source(quantised), dtype=dtype)
    assert same(ours, load_params(open_source(plain), dtype=dtype))
    save_folder(tmp_path / "folder", load_params(open_source(plain)), float_config)
    assert same(ours, load_params(open_source(tmp_path / "folder"), dtype=dtype))
    rows = load_file(tmp_path / "folder" / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    assert np.array_equal(interleave(rows, 2), floats["blk.0.attn_q.weight"][0])


def test_the_table_of_types_is_the_packages():
    for number, layout in TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == layout.name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (layout.values, layout.num_bytes)


MEMORY = """
import sys, threading, time
import psutil, jax
import gguf  # its code is not the model
import jax.numpy as jnp
from tessera.models.files.checkpoint import load_params
from tessera.models.files.source import open_source
source = open_source(sys.argv[1])
source.config
jax.block_until_ready(jnp.zeros(8) + 1)
process = psutil.Process()
before, peak, stop = process.memory_info().rss, [0], threading.Event()
def watch():
    while not stop.is_set():
        peak[0] = max(peak[0], process.memory_info().rss)
        time.sleep(0.001)
thread = threading.Thread(target=watch); thread.start()
params = load_params(source)
jax.block_until_ready(params)
stop.set(); thread.join()
print(peak[0] - before, sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


def test_peak_memory_is_the_model_and_less_than_one_tensor(tmp_path):
    metadata, tensors = tiny_model(40_000, hidden=512)
    tensors = {name: encode("Q8_0", a) if a.ndim == 2 else (a, Q.F32) for name, (a, _) in tensors.items()}
    path = write_gguf(tmp_path / "x.gguf", metadata, tensors)
    done = subprocess.run([sys.executable, "-c", MEMORY, path], capture_output=True, text=True, check=True)
    peak, model = (int(word) for word in done.stdout.split())
    slack = 24 << 20  # the block being dequantised, and the allocator's reserve
    assert model > 80 << 20  # otherwise slack could hide a second copy
    assert 0.9 * model < peak < model + slack


# Loading, plans, commands


@pytest.fixture
def tiny(tmp_path):
    """Return the tiny model twice: a folder with a byte tokenizer, and a GGUF file without a tokenizer."""
    folder = save_tiny(tmp_path / "folder", CONFIG)
    return folder, from_folder(folder, tmp_path / "x.gguf", tokenizer__ggml__eos_token_id=257)


def test_a_model_loads_runs_and_saves(tiny, tmp_path):
    folder, path = tiny
    ours, theirs = tessera.load(path), tessera.load(folder)
    assert ours.config == replace(theirs.config, eos_ids=(257,))  # the folder's chat template ends a turn with 261
    assert ours.source == str(path)
    assert ours.tokenizer is None
    prompt = [[1, 2, 3, 4]]
    [a], [b] = (model.generate(prompt, max_new_tokens=8) for model in (ours, theirs))
    assert a.tokens == b.tokens
    tessera.save(ours, tmp_path / "again")
    assert same(tessera.load(tmp_path / "again").params, theirs.params)
    assert tessera.load(path, dtype="bfloat16").params.embed.dtype == "bfloat16"


def test_a_plan_next_to_the_file_is_found(tiny):
    folder, path = tiny
    assert plan_path(path) == path.with_name("x.plan.json")
    with pytest.raises(ValueError, match=r"x\.plan\.json"):
        tessera.load(path, attention="kascade")
    params, config = random_params(CONFIG), open_source(path).config
    assert fingerprint(load_params(open_source(path)), config) == fingerprint(params, CONFIG)
    replace(PLAN, model=fingerprint(params, CONFIG)).save(plan_path(path))
    assert tessera.load(path, attention="kascade").plan == tessera.load(folder, attention="kascade").plan


def test_resolve_takes_files_and_says_what_it_takes(tmp_path):
    path = tmp_path / "model"
    path.write_bytes(b"GGUF")
    assert resolve(path).path == path
    with pytest.raises(ValueError, match="GGUF file"):
        resolve(tmp_path / "absent.gguf")


def test_commands_take_a_file(tiny, tmp_path, capsys):
    folder, path = tiny
    assert main(["generate", "--model", str(path), "--tokens", "1 2 3", "--max-new-tokens", "4"]) == 0
    from_file = capsys.readouterr().out
    assert main(["generate", "--model", str(folder), "--tokens", "1 2 3", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out == from_file
    assert main(["convert", str(path), str(tmp_path / "out")]) == 0
    assert same(tessera.load(tmp_path / "out").params, tessera.load(folder).params)
    converted, source = tessera.load(tmp_path / "out"), tessera.load(path)
    ids = [fingerprint(model.params, model.config) for model in (converted, source)]
    assert ids[0] == ids[1]
    if plan_path(path).is_file():
        plan_path(path).unlink()
    replace(PLAN, model=ids[0]).save(plan_path(path))
    assert main(["convert", str(path), str(tmp_path / "planned")]) == 0
    assert tessera.load(tmp_path / "planned", attention="kascade").plan == replace(PLAN, model=ids[0])
    path.write_bytes(path.read_bytes()[:500])
    assert main(["convert", str(path), str(tmp_path / "out2")]) == 2
    assert not (tmp_path / "out2").exists()
    assert capsys.readouterr().err.startswith("error: ")


def test_generate_chat_renders_the_template(tiny, capsys):
    folder, path = tiny
    model = tessera.load(folder)
    [answer] = model.generate([model.tokenizer.encode_chat([{"role": "user", "content": "Hi"}])], max_new_tokens=4)
    assert main(["generate", "--model", str(folder), "--chat", "Hi", "--max-new-tokens", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == list(answer.tokens)
    assert main(["generate", "--model", str(folder), "--chat", "--tokens", "1 2"]) == 2
    assert main(["generate", "--model", str(path), "--chat", "Hi"]) == 2  # the GGUF file has no tokenizer
    assert "has none: add its tokenizer.json" in capsys.readouterr().err


def test_inspect_takes_a_file(tiny):
    from tessera.models.files.source import find_config

    folder, path = tiny
    assert find_config(str(path))[0] == find_config(str(folder))[0] == CONFIG
    with pytest.raises(ValueError, match="GGUF file"):
        find_config(str(path.with_name("absent")))


def headers_read(monkeypatch) -> list[Path]:
    """List the GGUF files whose header is parsed from now on, each as often as it is parsed."""
    found, header = [], gguf_file._Header
    monkeypatch.setattr(gguf_file, "_Header", lambda file, path: found.append(path) or header(file, path))
    return found


@pytest.mark.parametrize("weights", [None, "int8", "gguf"])
def test_a_load_reads_the_header_once(tmp_path, monkeypatch, weights):
    path = tmp_path / "x.gguf"
    path.write_bytes(small_file(tmp_path))
    if weights == "gguf":
        metadata, tensors = tiny_model(64)
        path = write_gguf(path, metadata, {name: encode("Q8_0", x) for name, (x, _) in tensors.items()})
    read = headers_read(monkeypatch)
    tessera.load(path, weights=weights)
    assert read == [path]


def test_a_command_reads_the_header_once(tmp_path, monkeypatch, capsys):
    from tessera.deviceless import model_inspection, plan_check
    from tessera.serve import warm

    class Started(Exception):
        pass

    def start(*_, **__):
        raise Started

    found = model_inspection.StepInspection(compiled=False, model="x", chip="v6e", mesh=1, phase="decode", error="no")
    monkeypatch.setattr(model_inspection.tpu, "compile_for", lambda *_, **__: SimpleNamespace(**vars(found)))
    monkeypatch.setattr(plan_check, "require_compiler", lambda question: None)
    monkeypatch.setattr(warm, "paging_for", start)
    for module in (cli_processes, cli_train):
        monkeypatch.setattr(module, "together", lambda place, facts, wait_s, run: run())
    path, base, text = (tmp_path / name for name in ("x.gguf", "base.gguf", "text"))
    metadata, tensors = tiny_model(64)
    write_gguf(path, metadata, {name: encode("Q8_0", x) for name, (x, _) in tensors.items()})
    base.write_bytes(small_file(tmp_path))
    text.write_text("!" * 200)
    generate = ["generate", "--tokens", "1 2 3", "--max-new-tokens", "1", "--weights", "gguf", "--model", str(path)]
    train = ["train", "--text", str(text), "--steps", "1", "--length", "8", "--batch", "1", "--base", str(base)]
    one_of_two = ["--coordinator", "localhost:7000", "--processes", "2", "--process", "0"]
    read = headers_read(monkeypatch)
    for command in (
        generate,
        [*generate, *one_of_two],
        [*train, "--out", str(tmp_path / "one")],
        [*train, "--out", str(tmp_path / "two"), *one_of_two],
        ["inspect", "--mesh", "1", "--model", str(path)],
        ["fit", str(path)],
        ["fit", str(path), "--weights", "gguf", "int8", "--compile", "--length", "64"],
        ["serve", "--port", "0", str(path)],
    ):
        read.clear()
        with suppress(Started):
            assert main(command) < 2, capsys.readouterr().err
        assert read == [base if "train" in command else path], command
        capsys.readouterr()


def test_training_starts_from_a_file(tiny, tmp_path):
    """`base` may be a GGUF file: training takes its config, weights and tokenizer."""
    from tessera.train.mesh import MeshShape, build
    from tessera.train.recipes import text_recipe
    from tessera.train.state import start

    folder, path = tiny
    (tmp_path / "text").write_text("some text to train on " * 200)
    recipe = text_recipe(
        tmp_path / "text", config=open_source(path).config, base=path, length=32, batch=2, steps=1, rate=1e-3
    )
    params = start(recipe, build(MeshShape()), open_source(path)).params
    assert same(params, load_params(open_source(folder), stacked=True))


def test_the_real_file_equals_its_converted_folder(smollm2, tmp_path):
    """Config, weights and tokenizer are the same; one forward pass shows that the model answers sensibly.

    Takes 10 s: 135 M parameters are dequantised, written, read and run.
    """
    config, tokenizer = open_source(smollm2).config, open_source(smollm2).tokenizer
    params = load_params(open_source(smollm2), stacked=True)
    save_folder(tmp_path / "folder", params, config, tokenizer)
    again = open_source(tmp_path / "folder").config
    folder = load_params(open_source(tmp_path / "folder"), stacked=True)
    assert again == config
    assert same(folder, params)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.encode_chat(chat) + tokenizer.encode("The capital of France is")
    saved = open_source(tmp_path / "folder").tokenizer
    assert saved.encode_chat(chat) + saved.encode("The capital of France is") == prompt
    ours = whole_logits(params, np.array([prompt]), config=config)
    assert tokenizer.decode([int(ours[0, -1].argmax())]) == " Paris"
