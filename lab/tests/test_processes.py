"""Child processes with their peak memory, and the peer protocol."""

import sys
import textwrap

import pytest

from lab.bench.child import run_child
from lab.peers.process import Peer


def test_child_memory_and_output_are_its_own():
    code = "import sys; x = bytearray(int(sys.argv[1])); print(len(x)); sys.exit(3)"
    small, large = (run_child(code, str(size)) for size in (1 << 20, 1 << 27))
    assert large.status == 3
    assert large.stdout.strip() == str(1 << 27)
    assert large.peak_bytes - small.peak_bytes == pytest.approx((1 << 27) - (1 << 20), rel=0.1)
    with pytest.raises(TimeoutError, match="timeout_s"):
        run_child("import time; time.sleep(60)", timeout_s=0.3)


def test_peer_answers_reports_errors_and_dies_loudly(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(
        textwrap.dedent("""
        import json, sys
        for line in sys.stdin:
            request = json.loads(line)
            if request["call"] == "die":
                sys.exit(7)
            answer = {"error": "no such call"} if request["call"] == "bad" else {"twice": 2 * request["x"]}
            print(json.dumps(answer), flush=True)
    """)
    )
    with Peer(sys.executable, script) as peer:
        assert peer.ask("double", x=4) == {"twice": 8}
        with pytest.raises(RuntimeError, match="no such call"):
            peer.ask("bad")
        with pytest.raises(RuntimeError, match="exit status 7"):
            peer.ask("die")
    with pytest.raises(FileNotFoundError, match="make peers"):
        Peer(tmp_path / "missing", script)
