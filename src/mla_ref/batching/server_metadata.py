"""Read a batch from a dump of a server's attention metadata, under the server's names.

vLLM's `CommonAttentionMetadata` counts padding in (`num_reqs`, `num_actual_tokens`) and has no
field for the real counts, so the real requests are those up to the last one with a token. In a
server, just before the backend builds its own metadata, this writes the file:

    import json
    dump = {
        "query_start_loc": common.query_start_loc_cpu.tolist(),
        "is_prefilling": None if common.is_prefilling is None else common.is_prefilling.tolist(),
        "num_actual_tokens": common.num_actual_tokens,
        "seq_lens": common.seq_lens.tolist(),  # waits for the GPU: for a diagnosis only
    }
    json.dump(dump, open("step.json", "w"))
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mla_ref.batching.facts import BatchFacts, batch_facts, host_counts
from mla_ref.checks import describe, require_count


@dataclass(frozen=True)
class ServerBatch:
    """A batch as its server has it.

    Attributes:
        query_lens: New tokens of each request, padding included.
        is_prefilling: The flags as they are, those of padding included; None: not given.
        num_tokens_padded: Rows.
        seq_lens: Length of each request with its new tokens; None: not given.
    """

    query_lens: tuple[int, ...]
    is_prefilling: tuple[bool, ...] | None
    num_tokens_padded: int
    seq_lens: tuple[int, ...] | None = None

    @property
    def facts(self) -> BatchFacts:
        """What a router may know: the requests up to the last one that has a token."""
        real = max((r + 1 for r, q in enumerate(self.query_lens) if q), default=0)
        return batch_facts(
            self.query_lens,
            self.is_prefilling,
            num_reqs=real,
            num_tokens_padded=self.num_tokens_padded,
        )

    def visible_lens(self, unknown: int) -> list[int]:
        """Keys that each real row may see: row j of a request sees seq_len - query_len + j + 1.

        Args:
            unknown: The answer for every row where the lengths are not given.
        """
        if self.seq_lens is None:
            return [unknown] * sum(self.query_lens)
        pairs = zip(self.query_lens, self.seq_lens, strict=True)
        return [s - q + j + 1 for q, s in pairs for j in range(q)]


def read_metadata(data: Mapping[str, Any]) -> ServerBatch:
    """The batch in a JSON object with the server's names; other names are not looked at.

    Args:
        data: `query_start_loc` or `query_start_loc_cpu`; and if there, `is_prefilling` (bools, 0
            and 1, or null), `num_actual_tokens`, `seq_lens`, `num_reqs`.

    Raises:
        TypeError: A field that holds numbers has something else there; the message names it.
        ValueError: `data` is no JSON object, or a field is missing, has the wrong form or does not
            fit the others; the message names it.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"metadata must be a JSON object, got {describe(data)}")
    starts = data.get("query_start_loc_cpu")
    if starts is None:  # missing, or null: a server may keep the offsets in one place only
        starts = data.get("query_start_loc")
    if starts is None:
        found = [name for name, value in data.items() if value is not None]
        raise ValueError(f"query_start_loc must be there, got only {', '.join(found) or 'nothing'}")
    offsets = host_counts("query_start_loc", starts)
    if not offsets or offsets[0] != 0 or list(offsets) != sorted(offsets):
        raise ValueError(f"query_start_loc must start at 0 and not fall, got {list(offsets)}")
    lens = tuple(b - a for a, b in pairwise(offsets))
    padded = require_count("num_actual_tokens", data.get("num_actual_tokens", offsets[-1]))
    if padded < offsets[-1]:
        raise ValueError(f"num_actual_tokens must be at least {offsets[-1]}, got {padded}")
    seqs = None if data.get("seq_lens") is None else host_counts("seq_lens", data["seq_lens"])
    if require_count("num_reqs", data.get("num_reqs", len(lens))) != len(lens):
        raise ValueError(f"num_reqs is {data['num_reqs']}, but query_start_loc has {len(lens)}")
    if seqs is not None and (
        len(seqs) != len(lens) or any(s < q for q, s in zip(lens, seqs, strict=True))
    ):
        raise ValueError(
            f"seq_lens must hold the length of each of {len(lens)} requests with its new tokens, "
            f"got {list(seqs)}"
        )
    batch = ServerBatch(lens, _flags(data.get("is_prefilling")), padded, seqs)
    batch.facts  # noqa: B018  # raises where the fields do not fit each other
    return batch


def _flags(values: object) -> tuple[bool, ...] | None:
    """JSON has bools, and a dump of an integer tensor has 0 and 1."""
    if values is None:
        return None
    if not isinstance(values, list) or any(
        not isinstance(v, int) or v not in (0, 1) for v in values
    ):
        raise ValueError(f"is_prefilling must be a list of bools, 0 or 1, got {describe(values)}")
    return tuple(bool(v) for v in values)
