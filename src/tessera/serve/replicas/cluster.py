"""Run replicas as Ray actors, on this machine or across a Ray cluster, and the server in front of the replicas.

Ray places the processes, assigns chips to each, and reports when one ends. Requests do not pass through Ray: each actor
runs the server of `tessera serve` on a free port, and the front sends HTTP requests to that server. Ray Serve is not
used: its proxy would be a second front that knows neither the API keys and deadlines of `front` nor which prompts share
pages.

Without RAY_ADDRESS, Ray runs in child processes of the server and ends with it. With RAY_ADDRESS, replicas are spread
over that cluster, whose machines need the same Python environment, and the model at the same path.
"""

import asyncio
import atexit
import logging
import os
import resource
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tessera.serve.app import create
from tessera.serve.edge import server
from tessera.serve.replicas.relay import Relay
from tessera.serve.replicas.supervisor import Ended, Lost, Replicas
from tessera.serve.site import Site

logger = logging.getLogger(__name__)

ADDRESS = "RAY_ADDRESS"
"""Environment variable that holds the cluster's address; all Ray programs read it."""
TOKEN_MODE = "RAY_AUTH_MODE"
"""Environment variable that is "token" if Ray's processes accept only peers that know its token, else "disabled"."""
TOKEN = "RAY_AUTH_TOKEN"
"""Environment variable that holds the token; Ray prefers it to ~/.ray/auth_token."""
GIVE_TOKEN = (
    "run `ray get-auth-token --generate` on one machine, copy ~/.ray/auth_token to the others, and restart Ray on all "
    f"with {TOKEN_MODE}=token; {TOKEN_MODE}=disabled accepts a cluster that runs code for everyone who can reach it"
)
LOOPBACK = "127.0.0.1"
STORE_BYTES = 80 << 20
"""Bytes of Ray's object store on this machine, just above Ray's minimum of 75 MiB: replicas store nothing there."""
END_S = 10.0
"""Maximum seconds for a replica that is stopped to end its step."""
WRITE_S = 120.0
"""Maximum seconds for it to write its pages too: 8 GB at 80 MB/s take 100 s."""
LOOK_S = 0.5
"""Seconds between checks whether to go on waiting for replicas that end."""
NODES_S = 5.0
"""Seconds between checks of the cluster's machines, while a replica waits for its process."""
OWN_FILES = 100
"""File descriptors that the front keeps for Ray, for logs and for health checks."""
CHIPS = ("GPU", "TPU")
"""Ray's resource names for accelerators."""


class Actor:
    """Process of one replica: an engine and its HTTP server."""

    def reached(self) -> None:
        """Do nothing. A call that returns shows that this process and the front accept each other's token."""

    def start(self, build: Callable[[Sequence[str]], Site], keys: Sequence[str], own: str, host: str) -> str:
        """Load a model and serve it from a thread on a free port; `own` is the front's key, `host` "" this machine."""
        import ray

        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        logging.getLogger("tessera").setLevel(logging.INFO)
        # the server in front logs every request
        logging.getLogger("tessera.serve.edge.front").setLevel(logging.WARNING)
        site = build(keys)
        self._service = site.service
        bound = server.listen(host or ray.util.get_node_ip_address(), 0)
        running = server.Server(server.configured(create(site), keys, own), site.service)
        threading.Thread(target=running.run, kwargs={"sockets": [bound]}, name="http", daemon=True).start()
        return server.address(bound)

    def stop(self) -> None:
        """End the engine's thread, which writes its pages to disk if there is a folder for them (`--spill`)."""
        self._service.stop()


class Cluster:
    """The `supervisor.Launcher` that uses Ray.

    Args:
        build: loads the model and starts the engine's thread, in each replica's process; takes the API keys.
        keys: API keys of clients; if there are none, requests need no key.
        chips: number of GPUs or TPU chips per replica; ignored if no machine has any.
        end_s: maximum seconds for a replica that is stopped to end its step and write its pages.
    """

    def __init__(
        self, build: Callable[[Sequence[str]], Site], keys: Sequence[str], *, count: int, chips: int, end_s: float
    ):
        self._host = join()
        import ray  # not at the top: Ray is optional, and its import takes half a second

        self.key, self.keys, self._build, self._ray = secrets.token_hex(32), tuple(keys), build, ray
        self._chips = places(ray.nodes(), count, chips)
        self._end_s, self._lock, self._down = end_s, threading.Lock(), False
        self._left = threading.Event()  # set once no replica is waited for any more
        self._actors: dict[int, Any] = {}
        self._serving: set[int] = set()  # numbers of the replicas that have started
        self._nodes: dict[int, str | None] = {}

    async def start(self, index: int) -> str:
        from ray.exceptions import RayError, RayTaskError

        try:
            return await self._start(index)
        except RayTaskError as error:
            if isinstance(error.cause, ValueError | MemoryError | OSError):
                raise error.cause from None
            logger.error("the process of replica %d failed: %s", index, error)  # with the traceback there
            raise RuntimeError(f"the process of replica {index} failed: {error.cause!r}") from error
        except RayError as error:
            raise Lost(str(error)) from error

    async def _start(self, index: int) -> str:
        from ray.exceptions import RayActorError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = await self._machines()
        taken = [node for node in self._nodes.values() if node is not None]
        node = self._nodes[index] = None if self._chips else node_of(taken, nodes)
        strategy = "SPREAD" if node is None else NodeAffinitySchedulingStrategy(node, soft=True)
        options = {"num_cpus": 0, "scheduling_strategy": strategy, **self._chips}
        self._actors[index] = actor = self._ray.remote(Actor).options(**options).remote()
        try:
            await self._reach(actor)
        except RayActorError as error:
            raise OSError(
                f"the process of replica {index} ended before it answered. If its machine lacks Ray's token, "
                f"{GIVE_TOKEN}"
            ) from error
        try:
            url = await actor.start.remote(self._build, self.keys, self.key, self._host)
        except RayActorError as error:
            raise Lost("its process ended while loading the model") from error
        self._serving.add(index)
        return url

    async def _reach(self, actor: Any) -> None:
        """Wait until a replica's process answers, which takes long if no chips are free."""
        answer = asyncio.ensure_future(actor.reached.remote())
        while not (await asyncio.wait([answer], timeout=NODES_S))[0]:
            await self._machines()
        answer.result()

    async def _machines(self) -> list[Mapping[str, Any]]:
        """Return the cluster's machines; raise Ended if all are lost: Ray would wait indefinitely for a new one."""
        nodes = await asyncio.to_thread(self._ray.nodes)
        if not any(node["Alive"] for node in nodes):
            raise Ended("Ray has lost all machines: no replica can be started")
        return nodes

    async def stop(self, index: int, *, lost: bool) -> None:
        self._nodes.pop(index, None)
        if lost:
            self._serving.discard(index)
        if (actor := self._actors.pop(index, None)) is not None:
            await asyncio.to_thread(self._end, {index: actor})

    def close(self) -> None:
        actors = dict(self._actors)
        self._actors.clear()
        self._end(actors)

    def _end(self, actors: Mapping[int, Any]) -> None:
        asked = [actor.stop.remote() for index, actor in actors.items() if index in self._serving]
        self._serving.difference_update(actors)
        deadline = time.monotonic() + self._end_s
        while asked and time.monotonic() < deadline and not self._left.is_set():
            with self._lock:
                _, asked = ([], []) if self._down else self._ray.wait(asked, num_returns=len(asked), timeout=LOOK_S)
        with self._lock:
            for actor in () if self._down else actors.values():
                self._ray.kill(actor)

    def leave(self) -> None:
        """Wait for no replica any more: those that still write pages are ended at once."""
        self._left.set()

    def shut_down(self) -> None:
        """End all processes of replicas at once. Then end Ray if `join` started it, or else leave the cluster."""
        self.leave()
        self._serving.clear()
        self.close()
        with self._lock:  # another thread may still wait for replicas; after this, it must not call Ray
            self._down = True
            self._ray.shutdown()


def join() -> str:
    """Join the cluster that RAY_ADDRESS names; if it is not set, empty or "local", start Ray on this machine.

    Return the address on which replicas listen; "" if each listens on the address of the machine that runs it.
    """
    # A terminal that closes sends SIGHUP to Ray's processes too. They inherit this; the front sets its handler later.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Without "token", Ray runs code for everyone who can reach it. It takes every word that it does not know for no.
    os.environ[TOKEN_MODE] = mode = (os.environ.get(TOKEN_MODE) or "token").lower()
    if mode not in ("token", "disabled"):
        raise ValueError(f"{TOKEN_MODE}={mode} must be token or disabled: {GIVE_TOKEN}")
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # else a call after the end joins any cluster that runs here
    import ray
    from ray.exceptions import AuthenticationError

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # otherwise Ray sends usage statistics to its makers
    quiet = {"log_to_driver": False, "configure_logging": False, "logging_level": logging.ERROR}
    if os.environ.get(ADDRESS) in (None, "", "local"):
        # Ray would write a token to a file that all users may read, and its own folder is one that all may write.
        os.environ[TOKEN] = os.environ.get(TOKEN) or secrets.token_hex(32)
        folder = tempfile.mkdtemp(prefix="tessera-", dir="/tmp")  # a longer path would be too long for its sockets
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        # Ray's default ends a replica because other programs fill the memory.
        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
        os.environ["RAY_worker_niceness"] = "0"  # Ray's default, 15, starves replicas when other programs are busy
        quiet |= {"include_dashboard": False, "_temp_dir": f"{folder}/ray"}  # it lets all write
        ray.init(address="local", num_cpus=0, object_store_memory=STORE_BYTES, **quiet)
        return LOOPBACK
    try:
        ray.init(address="auto", **quiet)
    except (ConnectionError, ValueError) as error:
        raise OSError(f"{ADDRESS}={os.environ[ADDRESS]} names no running cluster: run `ray start` first") from error
    except AuthenticationError as error:
        named = f"{ADDRESS}={os.environ[ADDRESS]}"
        raise OSError(f"this machine has no token for {named}, or the wrong one: {GIVE_TOKEN}") from error
    return ""


def places(nodes: Sequence[Mapping[str, Any]], count: int, chips: int) -> dict[str, Any]:
    """Return the Ray options that give a replica its chips, all in one of `ray.nodes()`; {} if none has any."""
    present = [node["Resources"] for node in nodes if node["Alive"]]
    kind = next((kind for kind in CHIPS if any(resources.get(kind) for resources in present)), None)
    if kind is None:
        return {}
    room = sum(int(resources.get(kind, 0)) // chips for resources in present)
    if room < count:
        held = ", ".join(str(int(resources.get(kind, 0))) for resources in present)
        raise ValueError(
            f"--replicas {count} with {chips} chips each needs {count * chips} chips, but the machines have {held} "
            f"{kind}s, enough for {room} replicas: use fewer --replicas, or a smaller --mesh"
        )
    return {"num_gpus": chips} if kind == "GPU" else {"resources": {"TPU": chips}}


def node_of(taken: Sequence[str], nodes: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the node id of the running machine that is named least often in `taken`; None if no machine runs.

    Ray's strategy SPREAD balances resources. Replicas without chips use none, so Ray would put all on one machine.
    """
    present = sorted(node["NodeID"] for node in nodes if node["Alive"])
    return min(present, key=taken.count, default=None)


def clients(files: int) -> int:
    """Return how many clients may connect, with `files` descriptors; a request needs a second one, to its replica."""
    if files == resource.RLIM_INFINITY:
        return server.MAX_CONNECTIONS
    return max(1, min(server.MAX_CONNECTIONS, (files - OWN_FILES) // 2))


def run(
    launcher: Cluster,
    *,
    name: str,
    count: int,
    margin: int,
    context: int | None,
    bound: socket.socket,
    origins: Sequence[str] = (),
) -> None:
    """Serve on a socket from `server.listen` with several replicas until SIGTERM or Ctrl-C.

    SIGHUP restarts the replicas, one after another.

    `margin` is that of `routing.choose`; `context` is the maximum tokens of a request, None if only replicas know it.
    """

    async def serve() -> None:
        replicas = Replicas(launcher, count)
        relay = Relay(replicas, margin, context)
        configured = server.configured(relay, launcher.keys, origins=origins)
        configured.limit_concurrency = clients(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        front = server.Server(configured, replicas)
        server.take_signals(front)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, replicas.roll)
        logger.info("%s at %s/v1, starting %d replicas", name, server.address(bound), count)
        replicas.begin()
        try:
            await front.serve([bound])
        finally:
            launcher.leave()
            await replicas.end()

    try:
        asyncio.run(serve())
    finally:
        launcher.shut_down()
