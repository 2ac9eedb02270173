"""Downloads from the hub take only the files that are read; a folder on disk is the hub's side of the network."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from tessera.models.files.checkpoint import load_params
from tessera.models.files.source import open_source, resolve

GOLDEN = Path(__file__).parents[1] / "golden"
OTHERS = (
    "consolidated.safetensors consolidated.00.pth original/consolidated.00.pth model.fp16.safetensors tf_model.h5 "
    "pytorch_model.bin onnx/model.onnx onnx/config.json onnx/model.safetensors x-Q4_0.gguf README.md"
).split()
"""Files in the repositories of models that are never read."""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Return a function that serves a folder as owner/name, and a list of the files downloaded."""
    remote, cache, taken = tmp_path / "remote", tmp_path / "cache", []

    def names(_=None) -> list[str]:
        return sorted(path.relative_to(remote).as_posix() for path in remote.rglob("*") if path.is_file())

    def snapshot(_, **patterns) -> str:
        for file in filter_repo_objects(names(), **patterns):
            (cache / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(remote / file, cache / file)
            taken.append(file)
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda _, name: names())

    def serve(folder: Path, *more: str, without: str = "") -> list[str]:
        shutil.copytree(folder, remote)
        (remote / without).unlink() if without else None
        for file in more:
            (remote / file).parent.mkdir(exist_ok=True)
            (remote / file).write_text("{}")
        return taken

    return serve


@pytest.mark.parametrize("name", ["llama3", "sharded"])
def test_only_the_files_that_are_read_are_downloaded(hub, name):
    template = "additional_chat_templates/tool_use.jinja"
    taken = hub(GOLDEN / name, *OTHERS, "tokenizer.json", "chat_template.jinja", template)
    source = resolve("owner/name")
    own = {path.name for path in (GOLDEN / name).iterdir() if path.suffix in (".json", ".safetensors")}
    assert set(taken) == own | {"tokenizer.json", "chat_template.jinja", template}
    assert len(taken) == len(set(taken))
    load_params(source)


def test_an_index_that_remains_from_other_weights_is_ignored(hub, tmp_path):
    shard = "model-00001-of-00002.safetensors"
    taken = hub(GOLDEN / "llama3", shard)
    (tmp_path / "remote" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": shard}}))
    source = resolve("owner/name")
    assert "model.safetensors" in taken
    assert shard not in taken
    load_params(source)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["consolidated.safetensors"], "only as consolidated.safetensors, in its authors' own form: take the model in"),
        (["original/consolidated.00.pth"], "only as original/consolidated.00.pth, in its authors' own form"),
        (["pytorch_model.bin"], "as .bin or .pth files, which may run code: save them as safetensors"),
        (["a.gguf", "b.gguf"], "holds GGUF files: download one, such as a.gguf, and pass its path"),
        (["adapter_model.safetensors"], "only an adapter of another model: merge it"),
        (["model.fp16.safetensors"], "only model.fp16.safetensors: rename it to model.safetensors"),
        ([], "holds no weights"),
    ],
)
def test_other_forms_of_weights_are_refused_with_a_way_out(hub, tmp_path, files, said):
    hub(GOLDEN / "llama3", *files, without="model.safetensors")
    with pytest.raises(ValueError, match="model 'owner/name' of the Hugging Face hub holds .*") as error:
        resolve("owner/name")
    assert said in str(error.value)
    with pytest.raises(ValueError, match="remote holds") as error:  # the same folder on disk
        load_params(open_source(tmp_path / "remote"))
    assert said in str(error.value)
