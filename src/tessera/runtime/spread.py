"""Choose how the devices of a mesh share a prefill chunk: by heads, as they share weights and cache, or by rows.

By heads, every device computes all rows with its part of the weights, and each layer adds up the activations twice (two
all-reduces). By rows, each device computes its own rows with all weights of the layer, gathered from all devices.
Queries, keys and values then move from the devices of their rows to the devices of their heads, and attention outputs
move back. The cache thus stays split by heads, as decode needs it. For T rows of D numbers of b bytes, N query heads, K
KV heads and head dim H, each of n devices sends this many bytes per layer:

    by heads  4 (n - 1) / n * T * D * b
    by rows   (n - 1) / n * (weights of a layer + T / n * 2 (N + K) H b).

In a short call, the weights have more bytes than the activations: below `Sharing.break_even` rows, sharing by heads
sends fewer bytes.
"""

from dataclasses import dataclass
from typing import NamedTuple

from tessera.core.memory import format_bytes
from tessera.models.config import ModelConfig

ROWS_PER_DEVICE = 16384
"""Maximum rows of a chunk on one device. A longer chunk sends fewer bytes per row, but takes too much memory."""


class Sent(NamedTuple):
    """Bytes that one device sends per layer of a prefill chunk, for each way to share the chunk."""

    by_heads: float
    by_rows: float


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Sizes that determine how `devices` devices of the mesh axis "heads" share a prefill chunk.

    `itemsize` is the bytes of one activation, `layer_bytes` those of one layer's weights on all devices together.
    """

    config: ModelConfig
    devices: int
    itemsize: int
    layer_bytes: int

    def sent(self, num_rows: int) -> Sent:
        """Compute the bytes by the module's formulas for a chunk of `num_rows` rows."""
        share, config = (self.devices - 1) / self.devices, self.config
        heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
        by_heads = 4 * share * num_rows * config.hidden_size * self.itemsize
        return Sent(by_heads, share * (self.layer_bytes + num_rows / self.devices * heads * self.itemsize))

    @property
    def break_even(self) -> int | None:
        """Minimum rows of a chunk for which sharing by rows sends fewer bytes; None if it never does."""
        if self.devices == 1:
            return None
        fixed, one = self.sent(0).by_rows, self.sent(1)
        saved = one.by_heads - (one.by_rows - fixed)
        return int(fixed // saved) + 1 if saved > 0 else None

    def by_rows(self, rows: int) -> bool:
        """Return whether sharing by rows sends fewer bytes and the number of devices divides the rows."""
        least = self.break_even
        return least is not None and rows >= least and rows % self.devices == 0

    def chunk(self, *, num_keys: int, unit: int, rows_per_device: int) -> int | None:
        """Return the rows of the longest chunk; None if the devices should share that chunk by heads.

        The length is `unit` times a power of two, so that few lengths are compiled. It is at most `num_keys`, and on
        each device at most `rows_per_device`.
        """
        most = min(rows_per_device, ROWS_PER_DEVICE) * self.devices
        size = unit
        while 2 * size <= min(num_keys, most):
            size *= 2
        return size if self.by_rows(size) else None

    def explain(self, rows: int) -> str:
        """Say in one sentence how a chunk is shared, and why; see `by_rows`."""
        least = self.break_even
        if least is None:
            return "prefill chunks are shared by heads: by rows, a device would send more bytes for any chunk length"
        sent, how = self.sent(rows), "rows" if self.by_rows(rows) else "heads"
        said = f"a prefill chunk of {rows:,} rows is shared by {how}: a device sends {format_bytes(sent.by_heads)} per "
        said += f"layer by heads and {format_bytes(sent.by_rows)} by rows (break-even: {least:,} rows)"
        if rows >= least and how == "heads":
            said += f", but {self.devices} devices do not divide {rows:,} rows"
        return said
