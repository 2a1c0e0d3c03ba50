"""Speculative decoding: draft a few tokens cheaply, verify them all in one step of the target."""

from mla_ref.speculative.drafter import Draft, Drafter, DraftRequest, NgramDrafter
from mla_ref.speculative.metrics import AcceptanceStats
from mla_ref.speculative.mtp_drafter import MTPDrafter
from mla_ref.speculative.ngram import propose_ngram
from mla_ref.speculative.noise import Noise, position_noise
from mla_ref.speculative.rejection import rejection_sample
from mla_ref.speculative.sampling import SamplingParams, probs_of_rows, target_probs
from mla_ref.speculative.verify import NewTokens, verify
from mla_ref.speculative.walk import Verified

__all__ = [
    "AcceptanceStats",
    "Draft",
    "DraftRequest",
    "Drafter",
    "MTPDrafter",
    "NewTokens",
    "NgramDrafter",
    "Noise",
    "SamplingParams",
    "Verified",
    "position_noise",
    "probs_of_rows",
    "propose_ngram",
    "rejection_sample",
    "target_probs",
    "verify",
]
