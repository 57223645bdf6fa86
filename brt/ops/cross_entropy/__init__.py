"""Losses over a vocabulary, without ever holding all logits."""

from brt.ops.cross_entropy.api import Scored as Scored
from brt.ops.cross_entropy.api import cross_entropy as cross_entropy
from brt.ops.cross_entropy.api import token_scores as token_scores
