"""How the trained parts of this package were made, so that they can be made again."""

from mla_ref.training.corpus import Corpus, standard_library
from mla_ref.training.distill import distillation_loss, train_indexers
from mla_ref.training.trunk import attention_shares, run_trunk

__all__ = [
    "Corpus",
    "attention_shares",
    "distillation_loss",
    "run_trunk",
    "standard_library",
    "train_indexers",
]
