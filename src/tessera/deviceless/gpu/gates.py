"""The gates: conditions on a Hopper kernel's machine code that can be checked without a GPU.

Each kernel of a call must spill nothing, touch no local memory, fit the shared memory of a thread block, and run its
products without waits that ptxas reports as a performance loss. A kernel with LDGSTS copies must also group them and
wait for them (LDGDEPBAR, DEPBAR). At least one kernel of the call must multiply on the tensor cores (HGMMA), and at
least one must load by the copy engine (UTMALDG) or 16 bytes per thread (LDGSTS.128).
"""

from tessera.core import hardware
from tessera.deviceless.gpu import sass

SHARED_BYTES = hardware.chip("h200").on_chip_bytes
WATCHED = (
    "HGMMA UTMALDG UTMASTG LDGSTS LDGSTS.128 LDGDEPBAR DEPBAR LDL STL LDG STG LDS STS LDSM STSM BAR SYNCS MUFU FFMA "
    "FMUL FADD FMNMX SHFL WARPGROUP"
).split()
"""Instructions whose occurrences in the code `tessera inspect` reports."""


def broken(report: sass.Report) -> list[str]:
    """List the gates that one kernel breaks, with evidence from its report."""
    found = []
    if any(report.spill_bytes) or report.stack_bytes:
        found.append(f"registers are spilled: {report.line('bytes stack frame')!r}")
    if report.local:
        found.append(f"instructions that access local memory: {len(report.local)}, the first {report.local[0]!r}")
    if report.shared_bytes > SHARED_BYTES:
        found.append(f"{report.shared_bytes} bytes of shared memory, but a block has {SHARED_BYTES}")
    if "Performance Loss" in report.report:
        found.append(f"products wait for each other: {report.line('Performance Loss')!r}")
    return found


def broken_program(kernels: tuple[sass.Report, ...]) -> list[str]:
    """List the gates that the kernels of one attention call break, alone or together."""
    found = [f"{report.kernel}: {text}" for report in kernels for text in broken(report)]

    def has(*names: str) -> bool:
        return any(report.instructions.get(name) for report in kernels for name in names)

    if not has("HGMMA"):
        found.append("no kernel multiplies on the tensor cores: HGMMA is missing from the disassembly")
    if not has("UTMALDG", "LDGSTS.128"):
        found.append("no kernel loads by the copy engine or 16 bytes a thread: UTMALDG and LDGSTS.128 are missing")
    return [*found, *filter(None, map(unawaited, kernels))]


def unawaited(report: sass.Report) -> str | None:
    """Return a message if a kernel's LDGSTS copies lack the end of a group (LDGDEPBAR) or a wait (DEPBAR), else None.

    A wait for the copy engine's stores (UTMASTG) is a DEPBAR too, so a kernel with such stores needs one more DEPBAR.
    """
    has = report.instructions.get
    waits = has("DEPBAR", 0) - bool(has("UTMASTG"))
    if not has("LDGSTS") or (has("LDGDEPBAR") and waits > 0):
        return None
    return f"{report.kernel}: its copies by LDGSTS are not waited for: LDGDEPBAR or DEPBAR is missing"
