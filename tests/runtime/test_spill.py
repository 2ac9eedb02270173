"""Pages on disk: their bits survive restarts, and damage, kills and a full disk cost pages but never an error."""

import errno
import os
import resource
import signal
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from tessera.models.pages import Pages
from tessera.runtime.prefix import Prefix
from tessera.runtime.spill import Spill

SALT, LIMIT = b"salt", 1 << 20
KEYS = [bytes([i]) * 32 for i in range(8)]


def arrays(seed=0, size=5):
    """Layers of a page as an int8 cache and a bfloat16 one hold them. Odd sizes put the next array off its boundary."""
    x = np.random.default_rng(seed).standard_normal((2, size, 3))
    x[0, 0] = np.nan, np.inf, -0.0
    types = [ml_dtypes.bfloat16, np.float32, np.float16, ml_dtypes.float8_e4m3fn]
    return [np.arange(3 * size).astype(np.int8), *(x.astype(dtype) for dtype in types), np.zeros((0, 2)), x.T]


def same(one, two):
    return [(a.dtype, a.shape, a.tobytes()) for a in one] == [(b.dtype, b.shape, b.tobytes()) for b in two]


def page_file(folder, key):
    return next(folder.glob(f"*/{key.hex()}"))


def test_the_bits_of_every_dtype_survive_a_restart(tmp_path):
    spill = Spill(tmp_path, SALT, LIMIT)
    assert not spill.has(KEYS[0])
    assert spill.load(KEYS[0]) is None
    for seed, key in enumerate(KEYS):
        assert spill.save(key, arrays(seed))
    other = Spill(tmp_path, b"another model", LIMIT)
    assert not other.has(KEYS[0])
    again = Spill(tmp_path, SALT, LIMIT)
    assert all(again.has(key) and same(again.load(key), arrays(seed)) for seed, key in enumerate(KEYS))
    again.remove(KEYS[0])
    again.remove(KEYS[0])
    assert (again.load(KEYS[0]), again.has(KEYS[1])) == (None, True)


def test_a_damaged_or_foreign_file_is_removed_and_said(tmp_path, caplog):
    spill = Spill(tmp_path, SALT, LIMIT)
    spill.save(KEYS[1], arrays())
    place = page_file(tmp_path, KEYS[1])
    whole = place.read_bytes()
    Spill(tmp_path, b"another model", LIMIT).save(KEYS[1], arrays(1))
    foreign = next(path for path in tmp_path.glob(f"*/{KEYS[1].hex()}") if path != place).read_bytes()
    damaged = [whole[: len(whole) // 2], whole[:20], b"", b"PNG" * 99, whole + b"\0", foreign]
    damaged += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in (0, 33, 50, len(whole) - 1)]
    for data in damaged:
        spill.save(KEYS[1], arrays())
        place.write_bytes(data)
        caplog.clear()
        assert spill.load(KEYS[1]) is None
        assert f"{place} is cut short, damaged or from another model: removed" in caplog.text
        assert not place.exists()
    place.with_name(KEYS[3].hex()).write_bytes(whole)  # under the name of another page
    assert spill.load(KEYS[3]) is None


def test_the_oldest_pages_of_all_models_make_room(tmp_path):
    Spill(tmp_path / "one", SALT, LIMIT).save(KEYS[0], arrays())
    size = page_file(tmp_path / "one", KEYS[0]).stat().st_size
    folder, limit = tmp_path / "pages", 4 * size
    old, spill = Spill(folder, b"another model", limit), Spill(folder, SALT, limit)
    mine = [folder / "notes.txt", next(folder.iterdir()) / "notes.txt", folder / "mine" / KEYS[0].hex()]
    mine[2].parent.mkdir()
    for path in mine:  # older than every page
        path.write_text("mine")
    old.save(KEYS[0], arrays())
    for key in KEYS[1:4]:
        spill.save(key, arrays())
    assert spill.load(KEYS[1]) is not None  # from now on younger than page 2
    spill.save(KEYS[4], arrays())  # down to 15/16 of the limit: two pages go
    assert not old.has(KEYS[0])
    assert [spill.has(key) for key in KEYS[1:5]] == [True, False, True, True]
    spill.save(KEYS[3], arrays())  # held already: only younger
    again = Spill(folder, SALT, limit)
    again.save(KEYS[5], arrays())
    again.save(KEYS[6], arrays())
    assert [again.has(key) for key in KEYS[1:7]] == [False, False, True, False, True, True]
    Spill(folder, SALT, 2 * size)
    assert [again.has(key) for key in KEYS[3:7]] == [False, False, False, True]
    assert [path.read_text() for path in mine] == ["mine"] * 3


def test_a_page_larger_than_the_limit_evicts_nothing(tmp_path, caplog):
    spill = Spill(tmp_path, SALT, 1200)
    assert spill.save(KEYS[0], [np.zeros(99)])
    assert not spill.save(KEYS[1], [np.zeros(999)])
    assert "larger than the spill's limit of 1200" in caplog.text
    assert spill.has(KEYS[0])


def test_a_full_disk_only_logs(tmp_path, caplog):
    """A limit on file sizes makes the system refuse a write half-way, as a full disk does."""
    spill = Spill(tmp_path, SALT, LIMIT)
    spill.save(KEYS[0], arrays())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        assert not spill.save(KEYS[1], [np.zeros(9999)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.strerror(errno.EFBIG) in caplog.text
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [KEYS[0].hex()]
    assert spill.save(KEYS[1], [np.zeros(9999)])


KILLED = """
import os, signal, sys
import numpy as np
from tessera.runtime.spill import Spill
spill = Spill(sys.argv[1], b"salt", 1 << 20)
spill.save(bytes(32), [np.arange(9999)])
name, when = sys.argv[2:]
real = getattr(os, name)
def dies(*args):
    if when == "after":
        real(*args)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(os, name, dies)
spill.save(b"1" * 32, [np.arange(9999) + 1])
"""


def test_a_kill_leaves_whole_pages_and_a_start_that_cleans(tmp_path):
    points = [(name, when) for name in ("fsync", "replace") for when in ("before", "after")]
    folders = [tmp_path / "-".join(point) for point in points]
    commands = [[sys.executable, "-c", KILLED, folder, *point] for folder, point in zip(folders, points)]
    started = [subprocess.Popen(command) for command in commands]
    assert [process.wait() for process in started] == [-signal.SIGKILL] * 4
    left = [sum(path.suffix == ".tessera-tmp" for path in folder.rglob(".*")) for folder in folders]
    assert left == [1, 1, 1, 0]  # the kills came where they should
    for folder, point in zip(folders, points):
        mine = next(folder.glob("*")) / f".{KEYS[3].hex()}.{os.getpid()}.tessera-tmp"
        mine.write_bytes(b"left by a process with this one's number")
        spill = Spill(folder, SALT, LIMIT)
        assert not list(folder.rglob(".*"))
        assert same(spill.load(bytes(32)), [np.arange(9999)])
        assert (spill.load(b"1" * 32) is not None) == (point == ("replace", "after"))


def test_evicted_pages_come_back_from_disk(tmp_path):
    """A page's contents are its token here. The chain is evicted, and read back in a second life."""
    contents, spill = {}, Spill(tmp_path, SALT, LIMIT)
    prefix = Prefix(Pages(4, 1), SALT, lambda name, page: spill.save(name, [np.array(contents[page])]))
    tokens = [7, 8, 9]
    hashes, pages = prefix.hashes(tokens), prefix.allocate(3)
    contents |= dict(zip(pages, tokens))
    for name, parent, page in zip(hashes, [None, *hashes], pages):
        prefix.publish(name, parent, page)
    prefix.pages.release(pages)
    prefix.allocate(2)
    assert prefix.match(hashes) == pages[:1]
    found = [Spill(tmp_path, SALT, LIMIT).load(name) for name in hashes]
    assert found == [None, [np.array(8)], [np.array(9)]]


def test_what_the_system_refuses_is_said(tmp_path, caplog):
    """A folder in the place of a page: it can be neither read nor replaced."""
    spill = Spill(tmp_path, SALT, LIMIT)
    spill.save(KEYS[0], arrays())
    path = page_file(tmp_path, KEYS[0])
    path.unlink()
    path.mkdir()
    assert not spill.has(KEYS[0])
    assert spill.load(KEYS[0]) is None
    assert not spill.save(KEYS[0], arrays())
    spill.remove(KEYS[0])
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "cannot read a spilled page",
        "cannot spill a page",
    ]


def test_only_its_user_may_read_and_write_pages(tmp_path, monkeypatch):
    Spill(tmp_path, SALT, LIMIT).save(KEYS[0], arrays())
    [place] = tmp_path.iterdir()
    place.chmod(0o777)  # as an earlier version may have left it
    Spill(tmp_path, SALT, LIMIT)
    assert place.stat().st_mode & 0o777 == 0o700
    scan = os.scandir

    def refused(path):
        if os.fspath(path) == os.fspath(place):
            raise PermissionError(errno.EACCES, "no", os.fspath(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refused)
    assert Spill(tmp_path, b"another model", LIMIT).save(KEYS[0], arrays())  # beside another user's pages
    user = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: user)
    with pytest.raises(PermissionError, match="another user"):
        Spill(tmp_path, SALT, LIMIT)


def test_bad_calls_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="limit_bytes=0"):
        Spill(tmp_path, SALT, 0)
    with pytest.raises(ValueError, match="salt=b''"):
        Spill(tmp_path, b"", 1)
    spill = Spill(tmp_path, SALT, LIMIT)
    with pytest.raises(ValueError, match="must have 32 bytes"):
        spill.has(b"../../etc")
    for array in (np.array([{}]), np.zeros(2, ">f4"), np.array(["a"]), np.zeros(2, [("a", "f4")])):
        with pytest.raises(ValueError, match="cannot spill an array of"):
            spill.save(KEYS[0], [array])
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Spill(tmp_path / "file", SALT, LIMIT)
