"""Attention split over a mesh's "heads" axis equals attention on one device.

A child process runs the program, because JAX fixes the number of devices once per process.
"""

import subprocess
import sys

from emitters import fast_child

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import tessera
from tessera.attention.contract import KeyValues
from tessera.attention.dispatch import attend
from tessera.attention.parallel import AXIS
from tessera.models.cache import quantise
from tessera.sparse.kascade import Kascade

assert len(jax.devices()) == 2
mesh = Mesh(np.array(jax.devices()), (AXIS,))
key = jax.random.split(jax.random.key(0), 3)
q, k, v = (jax.random.normal(key[i], (2, 48, heads, 16)) for i, heads in enumerate((8, 4, 4)))
spec = tessera.AttentionSpec(tile=16, query_tile=16, mass=True)

def call(q, k, v):
    scored = tessera.attention(q, k, v, spec)
    selection = tessera.select_tiles(scored.mass, spec, fraction=0.4, minimum=16)
    return scored, tessera.attention(q, k, v, tessera.AttentionSpec(tile=16, query_tile=16), selection=selection)

whole = jax.jit(call)(q, k, v)
with jax.set_mesh(mesh):
    split = NamedSharding(mesh, P(None, None, AXIS))
    parts = jax.jit(call)(*(jax.device_put(x, split) for x in (q, k, v)))
assert "heads" in str(parts[0].out.sharding.spec)
for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts)):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6, atol=1e-6)

(k8, k_scale), (v8, v_scale) = quantise(k), quantise(v)
int8 = KeyValues.of(k8, v8)._replace(scales=jnp.moveaxis(jnp.stack([k_scale, v_scale], 3), 1, 3))
whole = jax.jit(attend)(q, int8)
with jax.set_mesh(mesh):
    by_head = NamedSharding(mesh, P(None, AXIS))
    part = jax.jit(attend)(jax.device_put(q, split), jax.tree.map(lambda x: jax.device_put(x, by_head), int8))
np.testing.assert_allclose(np.asarray(whole.out), np.asarray(part.out), rtol=1e-6, atol=1e-6)
assert np.abs(np.asarray(whole.out) - np.asarray(parts[0].out)).max() < 0.1

pages = jnp.array([[4, 1, 3], [2, 6, 5]], jnp.int32)
def deal(x):  # [B,K,S,H] -> a pool of 7 pages of 16 keys
    return jnp.full((7, 4, 16, 16), jnp.nan).at[pages].set(jnp.moveaxis(x.reshape(2, 4, 3, 16, 16), 2, 1))
contiguous = KeyValues.of(k, v)
pool = KeyValues(deal(contiguous.k), deal(contiguous.v), pages)
with jax.set_mesh(mesh):
    pool = KeyValues(*(jax.device_put(x, by_head) for x in pool[:2]), pages)
    part = jax.jit(attend)(jax.device_put(q, split), pool)
np.testing.assert_allclose(np.asarray(jax.jit(attend)(q, contiguous).out), np.asarray(part.out), rtol=1e-6, atol=1e-6)
try:
    with jax.set_mesh(mesh):
        jax.jit(tessera.attention)(q[:, :, :3], k[:, :, :3], v[:, :, :3])
except ValueError as error:
    assert "multiple of 2, the size" in str(error)
else:
    raise AssertionError("three heads on two devices were not refused")
"""


def test_a_call_split_by_heads_equals_the_whole():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        capture_output=True,
        text=True,
        env=fast_child(2),
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
