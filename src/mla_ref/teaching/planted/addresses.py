"""A bug of kernels' addresses, as published libraries had it."""

import numpy as np

from mla_ref.teaching.tile_memory import Array
from mla_ref.teaching.tile_model import Place


def row_addresses_in_32_bits(slots: Array, place: Place) -> Array:
    """BUG: page times stride in the type of the slots, int32. Right for the first 2 GiB.

    Beyond them the product turns negative, and the address lies before the cache.
    """
    page, offset = slots // place.page_size, slots % place.page_size
    stride, within = np.int32(place.page_stride), np.int32(place.slot_stride)
    return place.start + (page * stride + offset * within).astype(np.int64)
