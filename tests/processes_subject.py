"""One of several processes of cli/test_processes.py: sums over all devices in a loop, or loads its share of a model.

python processes_subject.py HOST:PORT COUNT INDEX loop | load FOLDER
"""

import sys

from peak import peak_bytes


def loop() -> int:
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from tessera.core import interrupt, mesh

    on = mesh.build(mesh.MeshShape(jax.device_count(), 1))
    x = mesh.put(np.ones(jax.device_count(), np.float32), on, "heads")
    total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(on, P()))
    while True:
        assert float(total(x)) == jax.device_count()
        print("summed", flush=True)
        interrupt.check()


def load(folder: str) -> int:
    """Print this process's growth in memory, and the bytes of its weights and of all weights."""
    import jax

    from tessera.core import mesh
    from tessera.models.files.checkpoint import load_params
    from tessera.models.files.source import open_source

    on = mesh.build(mesh.MeshShape(jax.device_count(), 1))
    jax.block_until_ready(jax.numpy.zeros(8))
    before = peak_bytes()
    leaves = jax.tree.leaves(load_params(open_source(folder), mesh=on))
    grown = peak_bytes() - before
    held = sum(shard.data.nbytes for x in leaves for shard in x.addressable_shards)
    print(grown, held, sum(x.nbytes for x in leaves), flush=True)
    return 0


def main() -> int:
    from tessera.cli.processes import together
    from tessera.core import interrupt
    from tessera.core.processes import place

    address, count, index, task, *more = sys.argv[1:]
    try:
        with interrupt.handled():
            interrupt.defer()
            return together(place(address, int(count), int(index)), {}, 60, lambda: globals()[task](*more))
    except KeyboardInterrupt:
        return interrupt.STATUS


if __name__ == "__main__":
    sys.exit(main())
