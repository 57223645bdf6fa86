"""Cross-entropy loss and token scores over a vocabulary, without storing all logits at once."""

from brt.ops.cross_entropy.api import TokenScores as TokenScores
from brt.ops.cross_entropy.api import cross_entropy as cross_entropy
from brt.ops.cross_entropy.api import token_scores as token_scores
