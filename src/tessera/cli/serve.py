"""The `tessera serve` command and its flags. Heavy modules are imported only when the command runs."""

import gc
import ipaddress
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from tessera.cli import flags
from tessera.cli.flags import Command, Omittable
from tessera.cli.keys import read_keys
from tessera.core.escapes import quoted

PATH = tyro.conf.arg(metavar="[MODEL]", help_behavior_hint="")
BOUNDS = (
    ("port", 0, 65535),
    ("slots", 1, 4096),
    ("queue", 0, 10**6),
    ("context", 2, 2**31),
    ("pages", 1, 2**31),
    ("replicas", 1, 1024),
    ("spill_gb", 0.001, 1e6),
)
"""Flags, each with its minimum and maximum."""


@dataclass(frozen=True, kw_only=True)
class Serve(Command):
    """Serve a model over HTTP with OpenAI's API: completions and chat completions, streamed or whole."""

    path: Annotated[Omittable[str], tyro.conf.Positional, PATH] = None
    """Hugging Face folder, GGUF file, hub id or "smollm2"; the shipped demo model if not given."""
    model: Annotated[Omittable[str], flags.MODEL] = None
    """The model, given as a flag."""
    plan: Omittable[Path] = None
    """Kascade plan; if not given, the plan next to the model or the one shipped for it, if any."""
    attention: Omittable[Literal["dense", "kascade"]] = None
    """Attention policy; if not given, kascade if there is a plan, else dense."""
    host: str = "127.0.0.1"
    """Address to listen on; an address that other machines can reach needs --api-key-file."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    api_key_file: Omittable[Path] = None
    """File with the accepted API keys, one per line."""
    cors: Omittable[tuple[str, ...]] = None
    """Origins of web pages that may use the server from a browser, such as https://chat.example.org, in addition to
    this machine's own pages; * allows every page, which then can use a server without API keys through your browser."""
    name: Annotated[Omittable[str], tyro.conf.arg(aliases=("--served-model-name", "--alias"))] = None
    """Name of the model in the API; the name of its file or folder if not given."""
    context: Annotated[Omittable[int], tyro.conf.arg(aliases=("-c", "--ctx-size", "--max-model-len"))] = None
    """Maximum tokens of one request, prompt and answer together; if not given, the model's context, or as much of it
    as fits in memory."""
    slots: Annotated[int, tyro.conf.arg(aliases=("-np", "--parallel", "--max-num-seqs"))] = 4
    """Maximum number of requests that are answered at the same time."""
    pages: Omittable[int] = None
    """Pages of keys and values to allocate; if not given, twice what --slots requests of --context tokens need, but at
    most a quarter of the free memory on a CPU, and 80 % of it on other devices."""
    pin: Omittable[tuple[Path, ...]] = None
    """Files of prefixes whose keys and values stay in the prefix cache: text files, or .json files with the "messages"
    that chats begin with."""
    spill: Omittable[Path] = None
    """Folder to which the prefix cache moves pages that memory has no room for; they survive a restart."""
    spill_gb: float = 8.0
    """Maximum size of the --spill folder, in GB."""
    exact: bool = False
    """Give a request the same answer, bit for bit, whether it runs alone or together with others: use one program for
    every prefill and one for every decode step."""
    queue: int = 64
    """Maximum number of requests that wait while all --slots are busy; further requests are refused with status 429."""
    dtype: flags.Dtype = "auto"
    """Dtype of weights and cache; auto is the checkpoint's own."""
    kv_dtype: Literal["auto", "int8"] = "auto"
    """Dtype of cached keys and values; auto is the weights'."""
    weights: Omittable[flags.Weights] = None
    """Store the weight matrices in fewer bits; see `tessera generate --help`."""
    mesh: Omittable[str] = None
    """Devices that share the model; see `tessera generate --help`."""
    replicas: Omittable[int] = None
    """Number of processes that each load the model and answer requests, all at one address. Needs Ray and, on several
    machines, a Ray cluster (docs/serving.md)."""

    def run(self) -> int:
        from tessera.core.extras import require

        for package in ("fastapi", "uvicorn", "prometheus_client", "llguidance"):
            require(package, "serve")
        self.check_given()
        for name, least, most in BOUNDS:
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ValueError(f"--{name.replace('_', '-')} {value} must be from {least} to {most:,}")
        if self.replicas is not None:
            require("ray", "cluster")
        if self.path is not None and self.model is not None:
            raise ValueError(f"the model is given twice, as {self.path} and as --model {self.model}: drop one")
        keys = self.keys()
        from tessera.serve import app
        from tessera.serve.edge import cors, server

        origins = cors.origins(self.cors or ())
        bound = server.listen(self.host, self.port)
        with bound:
            if self.replicas is not None:
                return self.run_replicas(bound, keys, origins)
            site = self.site(keys)
            app.run(site, bound, keys, origins)
        if site.service.error is not None:
            raise site.service.error
        if site.service.alive:  # the engine still computes or compiles, and would abort in Python's normal exit
            sys.stderr.flush()
            os._exit(0)
        return 0 if site.service.ended else 1  # a bug has ended the engine's thread and printed its traceback

    def check_given(self) -> None:
        """Refuse a flag that is empty, as an unset variable in a script is, and a name that cannot be shown."""
        for name in ("host", "name"):
            if getattr(self, name) == "":
                raise ValueError(f'--{name} "" is empty: give it a value, or leave out --{name}')
        if self.pin is not None and (not self.pin or Path() in self.pin):  # Path("") is Path()
            raise ValueError("--pin names no file: name at least one, or leave out --pin")
        if self.cors is not None and "" in (self.cors or ("",)):
            raise ValueError("--cors names no origin: name at least one, or leave out --cors")
        if not self.served_name.isprintable():  # half a character, which JSON cannot hold, or a control character
            raise ValueError(f"the model's name {quoted(self.served_name)} cannot be shown: choose one with --name")

    def run_replicas(self, bound, keys: tuple[str, ...], origins: tuple[str, ...]) -> int:
        from tessera.cli.model_commands import named_model
        from tessera.core.mesh import parse
        from tessera.models.files.source import resolve
        from tessera.serve.replicas import cluster

        shape = (1, 1) if self.mesh is None else parse(self.mesh, 1)
        source = resolve(named_model(self.named))
        full = {name: None if (path := getattr(self, name)) is None else path.absolute() for name in ("plan", "spill")}
        full["pin"] = None if self.pin is None else tuple(path.absolute() for path in self.pin)
        same = replace(self, path=os.path.abspath(source.path), model=None, name=self.served_name, **full)
        end_s = cluster.END_S if self.spill is None else cluster.WRITE_S
        launcher = cluster.Cluster(same.site, keys, count=self.replicas, chips=shape[0] * shape[1], end_s=end_s)
        named = {"name": self.served_name, "context": self.context, "origins": origins}
        cluster.run(launcher, count=self.replicas, margin=self.slots, bound=bound, **named)
        return 0

    @property
    def named(self) -> str | None:
        """The model as the user names it; None for the demo model."""
        return self.path if self.model is None else self.model

    @property
    def served_name(self) -> str:
        return self.name or os.path.basename(str(self.named or "tessera-demo").rstrip("/")).removesuffix(".gguf")

    def keys(self) -> tuple[str, ...]:
        """Read the API keys; raise ValueError if there are none and other machines can reach --host."""
        if self.api_key_file is None:
            if not is_local(self.host):
                raise ValueError(
                    f"--host {self.host} may let other machines connect, and anyone there could use the model: "
                    f"add --api-key-file FILE, or listen on 127.0.0.1"
                )
            return ()
        return read_keys(self.api_key_file)

    def site(self, keys: Sequence[str]):
        from tessera.cli.model_commands import named_model
        from tessera.core.files import check_writable
        from tessera.generate import load, locate_plan
        from tessera.models.files.source import resolve
        from tessera.serve.edge.bodies import Bodies
        from tessera.serve.edge.front import tenant_of
        from tessera.serve.site import Site
        from tessera.serve.warm import context_that_fits, grammars_for, paging_for, pinned, start

        if self.spill is not None:
            check_writable(self.spill, folder=True, flag="--spill")
        source = resolve(named_model(self.named)).path
        planned = self.plan is not None or locate_plan(source) is not None
        attention = self.attention or ("kascade" if planned else "dense")
        names = ("dtype", "weights", "kv_dtype", "mesh", "plan")
        model = load(source, attention=attention, **{name: getattr(self, name) for name in names})
        grammars = grammars_for(model)
        context = context_that_fits(model, self.context)
        paging = paging_for(model, slots=self.slots, context=context, pages=self.pages, exact=self.exact)
        if self.spill is not None:
            paging = replace(paging, spill=self.spill, spill_bytes=int(self.spill_gb * 1e9))
        bodies = Bodies(context)
        bodies.start()
        gc.collect()
        gc.freeze()  # else a later collection looks at all objects of JAX, and all threads wait for 0.1 to 0.3 s
        service = start(
            model,
            context=context,
            slots=self.slots,
            queue=self.queue,
            paging=paging,
            pins=pinned(model, self.pin or (), context, paging.unit),
            tenants=[tenant_of(key) for key in keys] or [""],
        )
        return Site(
            model=model, name=self.served_name, service=service, context=context, grammars=grammars, bodies=bodies
        )


def is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"
