"""A real server on a thread of the test's process, and the tiny model that it serves."""

import threading
import time
from dataclasses import replace

import httpx2 as httpx
import openai
from tiny import CONFIG, save_tiny

from tessera.generate import load
from tessera.serve import warm
from tessera.serve.app import create
from tessera.serve.edge import server
from tessera.serve.edge.bodies import Bodies
from tessera.serve.site import Site

CONTEXT = 256
KEY = "a-secret"


class Running:
    """A server on a thread of this process."""

    def __init__(self, model, service, keys=(), context=CONTEXT):
        self.service = service
        grammars = warm.grammars_for(model)
        named = {"model": model, "name": "tiny", "service": service, "context": context, "grammars": grammars}
        self.site = Site(**named, bodies=Bodies(context))
        self.socket = server.listen("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = server.Server(server.configured(create(self.site), keys), service)
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=60)
        self._thread.start()
        self.until(lambda: self.service.ready and self.server.started, 600.0)  # the warm-up on a busy machine

    def until(self, condition, limit_s=60.0):
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, "the server did not get there"
            time.sleep(0.01)

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    def close(self):
        if self.service.alive:
            self.service.stop()
        self._thread.join(30)
        self.client.close()
        self.socket.close()
        assert not self._thread.is_alive()
        assert not self.service.alive


def tiny_model(folder):
    """Save a tiny model and load it under Kascade; its plan's cross-over is at 100 tokens."""
    return load(save_tiny(folder, replace(CONFIG, max_positions=CONTEXT)), attention="kascade")


def start(model, keys=(), context=CONTEXT):
    """Serve the model with two rows."""
    return Running(model, warm.start(model, context=context, slots=2, queue=16), keys=keys, context=context)


def ask(running, prompt, **options):
    """Complete a prompt, greedily unless `options` set a temperature."""
    return running.client.completions.create(model="tiny", prompt=prompt, **{"temperature": 0} | options)
