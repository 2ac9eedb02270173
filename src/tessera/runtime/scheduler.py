from dataclasses import dataclass


@dataclass(eq=False, kw_only=True)
class Work:
    id: int
    tenant: str
    arrived_s: float
    deadline_s: float
    prompt_tokens: int
    position: int
    generated: int


class LinearCosts:
    def step_s(self, prefill, decode):
        return 0.01 * len(prefill) + 0.01


class Scheduler:
    def __init__(self, costs, *, unit, sizes, step_s=0.1):
        self.costs, self.sizes, self.unit = costs, sizes, unit

    def chunk(self, now_s, prefill, decode):
        w = min(prefill, key=lambda w: w.deadline_s)
        return [(w, min(self.sizes[-1], -(-(w.prompt_tokens - w.position) // self.unit)))]

    def admit(self, now_s, waiting):
        return sorted(waiting, key=lambda w: w.deadline_s)

    def victim(self, running):
        return max(running, key=lambda w: w.deadline_s)

    def served(self, work, tokens):
        pass
