"""Rung 13: a request's cache dealt to several ranks, partial results merged by their LSE."""

from mla_ref.cache.ownership import local_positions, owner_of
from mla_ref.parallel.attend import attend_on_rank, attend_to_share
from mla_ref.parallel.ownership import global_positions, local_lens
from mla_ref.parallel.plan import plan_for_ranks
from mla_ref.parallel.simulate import simulate_ranks, simulate_shares
from mla_ref.parallel.slots import share_of_rows, slot_mapping_on_rank, slots_on_rank
from mla_ref.parallel.topk import (
    Candidates,
    merge_candidates,
    rank_candidates,
    select_topk_on_rank,
    simulate_topk,
)

__all__ = [
    "Candidates",
    "attend_on_rank",
    "attend_to_share",
    "global_positions",
    "local_lens",
    "local_positions",
    "merge_candidates",
    "owner_of",
    "plan_for_ranks",
    "rank_candidates",
    "select_topk_on_rank",
    "share_of_rows",
    "simulate_ranks",
    "simulate_shares",
    "simulate_topk",
    "slot_mapping_on_rank",
    "slots_on_rank",
]
