"""Put a batch in order: decodes, short extends, long extends, prefills, by as few moves as needed.

Length alone does not tell a decode from the last short chunk of a prompt, and neither of them from
a new prompt of one word (vllm#37303, vllm-ascend#5583). The scheduler's counts do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mla_ref.batching.facts import host_counts
from mla_ref.checks import require_count

# In the order of a batch.
CLASSES = ("decode", "short_extend", "long_extend", "prefill")


@dataclass(frozen=True)
class Order:
    """Where each request goes.

    Attributes:
        order: order[i] is the request that stands at place i afterwards.
        swaps: The same as pairs of places to swap, one after the other: what a runner applies to
            tensors that outlive the step.
    """

    order: tuple[int, ...]
    swaps: tuple[tuple[int, int], ...]

    @property
    def moved(self) -> bool:
        """Whether anything moves."""
        return bool(self.swaps)

    @property
    def inverse(self) -> tuple[int, ...]:
        """inverse[r] is the place of request r afterwards: it brings results back in order."""
        places = [0] * len(self.order)
        for place, request in enumerate(self.order):
            places[request] = place
        return tuple(places)


def request_class(scheduled: int, computed: int, prompt: int, *, decode_threshold: int = 1) -> str:
    """Which of `CLASSES` a request belongs to.

    Args:
        scheduled: New tokens of this step.
        computed: Tokens that the cache holds. None of them: a prefill, even of one token.
        prompt: Tokens of the prompt.
        decode_threshold: The longest query that may be a decode or a short extend.
    """
    for name, value in (("scheduled", scheduled), ("computed", computed), ("prompt", prompt)):
        require_count(name, value)
    require_count("decode_threshold", decode_threshold, at_least=1)
    if computed == 0:
        return "prefill"
    if scheduled > decode_threshold:
        return "long_extend"
    return "short_extend" if computed < prompt else "decode"


def reorder_batch(
    scheduled: Sequence[int],
    computed: Sequence[int],
    prompt: Sequence[int],
    *,
    decode_threshold: int = 1,
) -> Order:
    """The order of `CLASSES`, moving only requests that stand in a place of another class.

    It is no stable sort of the batch: a request that stands among its own kind stays where it is,
    because every move copies a row of every persistent tensor.

    Args:
        scheduled: New tokens of each request.
        computed: Tokens of each request that the cache holds.
        prompt: Tokens of each prompt.
        decode_threshold: The longest query that may be a decode or a short extend.

    Raises:
        ValueError: The lists differ in length, or a number is negative.
    """
    require_count("decode_threshold", decode_threshold, at_least=1)
    lists = {"scheduled": scheduled, "computed": computed, "prompt": prompt}
    rows = {name: host_counts(name, values) for name, values in lists.items()}
    for name, values in rows.items():
        if len(values) != len(rows["scheduled"]):
            raise ValueError(
                f"scheduled has {len(rows['scheduled'])} requests but {name} has {len(values)}"
            )
    ranks = [
        CLASSES.index(request_class(*row, decode_threshold=decode_threshold))
        for row in zip(*rows.values(), strict=True)
    ]
    wanted = sorted(ranks)
    places = [i for i, rank in enumerate(ranks) if rank != wanted[i]]
    movers = sorted(places, key=lambda i: ranks[i])  # stable: equals keep their order
    order = list(range(len(ranks)))
    for place, request in zip(places, movers, strict=True):
        order[place] = request
    return Order(tuple(order), _swaps(order))


def _swaps(order: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Cycle by cycle: a cycle of n places takes n - 1 swaps."""
    swaps, done = [], set()
    for start in range(len(order)):
        place = start
        while place not in done:
            done.add(place)
            source = order[place]
            if source != start:
                swaps.append((place, source))
            place = source
    return tuple(swaps)
