"""Compile every configuration of the kernels of one platform with its real compiler, and check the result.

    python -m lab study compiles --platform gpu             # resumes where it stopped; --list prints what is left
    python -m lab study compiles --platform gpu --report    # records into evidence/

The cases, the check of each and the records are `sweep`'s for a TPU (an hour) and `gpu_gates`' for Hopper (hours).
"""

import json
import random
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lab import campaign
from lab.studies import gpu_gates, sweep
from tessera.core import files
from tessera.measure import evidence

PLATFORMS = MappingProxyType({"tpu": sweep, "gpu": gpu_gates})
OUT = MappingProxyType({"tpu": Path("build/tpu-sweep.jsonl"), "gpu": Path("build/gpu-gates.jsonl")})


def study(options: Any) -> int:
    """Compile what this commit has not compiled, and retry what hit the time limit; return 1 if a case fails."""
    platform, out = PLATFORMS[options.platform], options.out or OUT[options.platform]
    identity = platform.identity

    def still_counts(line: Mapping[str, Any]) -> bool:
        return line.get("commit") in options.also and campaign.is_done(line, {})

    if options.report:
        found = campaign.lines_to_report(out)
        planned = set(map(identity, platform.cases()))  # a config that failed may have left the search space since
        lines = [line for line in found if still_counts(line)] + campaign.of_last_code(found, identity)
        counted = {identity(line): line for line in lines if identity(line) in planned}
        command = f"python -m lab study compiles --platform {options.platform}"
        made = platform.records(list(counted.values()), f"{command}; {command} --report")
        evidence.append(platform.EVIDENCE, made)
        return 0
    found, code = files.read_lines(out), asdict(evidence.code())
    done = {identity(line) for line in found if campaign.is_done(line, code) or still_counts(line)}
    asked = (case for case in platform.cases() if all(word in platform.words(case) for word in options.only))
    todo = [case for case in asked if identity(case) not in done]
    random.Random(0).shuffle(todo)  # so that an interrupted run has covered a bit of everything
    todo.sort(key=platform.urgency)
    if options.list:
        print("\n".join(json.dumps(case) for case in todo))
        return 0
    with platform.compiler() as compiler:
        for number, case in enumerate(todo[: options.most], start=1):
            result = platform.run(case, compiler, options.limit_s) | code
            found.append(result)
            files.append_line(out, result)
            print(f"{number}/{len(todo)} {platform.words(case)}: {platform.fault(result) or 'ok'}"[:300], flush=True)
    return 1 if any(map(platform.fault, campaign.of_last_code(found, identity))) else 0
