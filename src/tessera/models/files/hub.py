"""Download a model of the Hugging Face hub: the files that are read, and no other form of the weights."""

from collections.abc import Callable
from pathlib import Path

from tessera.core.fields import read_json
from tessera.models.files.tensor_file import INDEX, SINGLE, no_weights


def download(name: str, *, config_only: bool, check: Callable[[Path], object]) -> Path:
    """Download a model "owner/name", or its config files alone, into the hub's cache and return its folder.

    check(folder) is called before the weights are downloaded; an error stops the download.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        if config_only:
            return Path(snapshot_download(name, allow_patterns=["config.json", "generation_config.json"]))
        small = {"allow_patterns": ["*.json", "*.jinja", "tokenizer.model"], "ignore_patterns": ["*/*.json"]}
        folder = Path(snapshot_download(name, **small))
        check(folder)
        folder = Path(snapshot_download(name, allow_patterns=[SINGLE]))
        if (folder / SINGLE).is_file():  # an index that remains from other weights may name no file of the hub
            return folder
        if shards := _shards(folder):
            return Path(snapshot_download(name, allow_patterns=shards))
        names = HfApi().list_repo_files(name)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"model {name!r} is neither a local folder nor reachable on the Hugging Face hub ({reason}): "
            f"check the name, the network and your access rights, or pass a folder"
        ) from error
    raise no_weights(f"model {name!r} of the Hugging Face hub", names)


def _shards(folder: Path) -> list[str]:
    index = folder / INDEX
    found = read_json(index).get("weight_map") if index.is_file() else None
    return sorted({str(file) for file in found.values()}) if isinstance(found, dict) else []
