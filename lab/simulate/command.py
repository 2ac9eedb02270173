"""The `python -m lab simulate` command and its flags. Heavy modules are imported only when the command runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tessera.cli.flags import Several
from tessera.core.files import check_writable

BOUNDS = (("day_hours", 0, 24), ("minutes", 0.1, 1440))
"""Flags, each with its minimum and maximum. A load of less than 0.1 minutes may hold no request."""


@dataclass(frozen=True, kw_only=True)
class Simulate:
    """Simulate serving Llama-3.1-8B for a day: the real scheduler, page pool and prefix cache, with predicted step
    times. Needs no chip."""

    machine: Several[Literal["v6e-8", "h200-8"]] = ()
    """Machines to simulate: v6e-8 runs two replicas on four v6e each, h200-8 four replicas on two H200 each; both
    machines if not given."""
    day_hours: float = 24.0
    """Hours of the simulated day; 0 leaves the day out. A shorter day has the same request rates for a shorter time."""
    minutes: float = 20.0
    """Minutes of constant load at each request rate that the search for the capacity tries."""
    out: Path = Path("evidence/simulate.jsonl")
    """File to append the records to."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Simulate every scenario and append a record for each."""
        for name, least, most in BOUNDS:
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"--{name.replace('_', '-')} {value:g} must be from {least} to {most:,}")
        import jax

        jax.config.update("jax_platforms", "cpu")  # the records only name this machine
        from lab.simulate import study
        from tessera.measure import evidence

        check_writable(self.out)
        for machine in dict.fromkeys(self.machine or study.MACHINES):
            for record in study.run(machine, day_hours=self.day_hours, minutes=self.minutes):
                evidence.append(self.out, record)
        return 0
