"""Run agent loops and structured output of OpenAI's client and of libraries over it against `tessera serve`.

    make clients                              a model whose answers are scripted: every case must pass
    make clients MODEL=file.gguf              a real model with a template for tools; a case that fails because of what
                                              the model wrote is shown as such

Tessera's own interpreter runs this; the clients run in their own environment (clients.py). It prints a table and,
with --out, appends a record per client. The exit code is 1 if the server refused a request or a client could not read a
response, or if a scripted case failed at all.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from lab.peers.process import Peer
from lab.served.child import KEYS, serving
from tessera.core.child import Ended
from tessera.measure import evidence

ROOT = Path(__file__).parents[2]
PYTHON, SCRIPT = ROOT / ".venv-clients" / "bin" / "python", ROOT / "lab" / "peers" / "clients.py"
NAME = "served"
"""Name of the model in the API."""
SCRIPTED = "answers from a script"
SCRIPTS = {
    "W": ["<tool_call>", '\n{"name": "wea', 'ther", "arguments": {"city": "Pa', 'ris"}}\n', "</tool_call>"],
    "F": ['{"name":"wea', 'ther","arguments":{"city":"', 'Paris"}}'],
    "C": ['{"name":"Ci', 'ty","arguments":{"name":"', "Par", 'is","country":"', 'France"}}'],
    "P": ['{"name":"Partial', 'City","arguments":{"name":"', "Pa", 'ris","country":"', "Fr", 'ance"}}'],
    "O": ['{"name":"final_', 'result","arguments":{"name":"', "Pari", 's","country":"', "Franc", 'e"}}'],
    "J": ['{"name":"', "Paris", '","country":"', "Fran", 'ce"}'],
    "A": ["It is ", "18 degrees ", "and sunny."],
}
"""Answers, by the character with which TEMPLATE ends: a call in Hermes' form, four forced calls, JSON, and a text.

A grammar allows no token that begins in the text that it prescribes and ends after it."""
TEMPLATE = """
{%- set names = (tools or []) | map(attribute='function.name') | list %}{{ names | join(',') }}
{%- set asked = messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | last %}
{%- for m in messages %}
    {{- '<|user|>' if m.role != 'assistant' else '<|assistant|>' }}{{ m.content or '' }}
    {%- for c in m.tool_calls or [] %}{{ c.id ~ c.function.name ~ c.function.arguments | tojson }}{% endfor %}
{%- endfor %}
{%- if messages[-1].role == 'tool' %}{{ 'O' if 'final_result' in names else 'A' }}
{%- elif 'City' in names %}C{% elif 'PartialCity' in names %}P
{%- elif 'weather' in names %}{{ 'F' if 'with the tool' in asked else 'W' }}
{%- elif names %}O{% else %}J{% endif %}"""


def scripted(folder: Path) -> Path:
    """Save the model whose answers are scripted."""
    sys.path.insert(0, str(ROOT / "tests"))
    from scripted import save_scripted

    return save_scripted(folder, SCRIPTS, special=("<tool_call>", "</tool_call>"), template=TEMPLATE, context=2048)


def outcomes(peer: Peer, url: str, chosen: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Run cases and print each; return their answers with the cases' names and seconds."""
    console, found = Console(soft_wrap=True, highlight=False), []
    for client, what, how in chosen:
        began = time.monotonic()
        try:
            peer.ask("at", url=url, key=KEYS[0], model=NAME)  # each time, because a worker that ended has forgotten it
            answer = peer.ask("run", client=client, what=what, how=how)
        except Ended as ended:
            answer = {"fault": str(ended)[-300:]}
        seconds = round(time.monotonic() - began, 1)
        said = next((f"{kind}: {answer[kind]}" for kind in ("fault", "model") if kind in answer), "ok")
        shown = json.dumps(answer.get("kept", ""), ensure_ascii=False)
        console.print(f"{client:18} {what:28} {how:9} {seconds:6.1f} s  {said} {shown}", markup=False)
        found.append({"case": what, "how": how, "seconds": seconds, **answer})
    return found


def record(model: str, versions: Mapping[str, str], client: str, cases: Sequence[Mapping[str, Any]]) -> evidence.Record:
    """Make a client's record: the share of its cases that passed, and the answer of each."""
    what = evidence.What(
        op="client loops",
        kernel=client,
        workload=f"{model}, agent loops and structured output",
        config={"versions": versions},
    )
    facts = {"cases": cases, "faults": sum("fault" in case for case in cases)}
    share = sum("kept" in case for case in cases) / len(cases)
    command = "make clients" if model == SCRIPTED else f"make clients MODEL={model}.gguf"
    return evidence.make(what, [share], command=command, unit="fraction", facts=facts)


def main() -> int:
    """Return 0 if all went well, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="real model; the scripted one if not given")
    parser.add_argument("--only", nargs="*", default=[""], help="run only cases whose words hold one of these texts")
    parser.add_argument("--out", type=Path, help="file to which the records are appended")
    flags = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unlike the default, this also ends the server
    with tempfile.TemporaryDirectory(prefix="tessera-clients-") as folder:
        path = flags.model or scripted(Path(folder) / "scripted")
        name = flags.model.stem if flags.model else SCRIPTED
        size = ["--context", "2048", "--slots", "2"]
        peer, found = Peer(PYTHON, SCRIPT), []
        with closing(peer), serving(str(path), "--name", NAME, *size) as server:
            versions = peer.ask("hello")
            chosen = [
                case
                for case in peer.ask("cases")["cases"]
                if any(f" {one}" in f" {' '.join(case)}" for one in flags.only)
            ]
            for client in versions:
                cases = outcomes(peer, server.url, [case for case in chosen if case[0] == client])
                found += cases
                if flags.out is not None and cases:
                    evidence.append(flags.out, record(name, versions, client, cases))
    kinds = {kind: sum(kind in answer for answer in found) for kind in ("kept", "model", "fault")}
    print(f"{name}: {kinds['kept']} of {len(found)} cases passed; {kinds['model']} failed by the model's answer")
    print(f"{kinds['fault']} failed by the server or in the client; {versions}")
    return int(kinds["fault"] > 0 or (flags.model is None and kinds["kept"] < len(found)))


if __name__ == "__main__":
    sys.exit(main())
