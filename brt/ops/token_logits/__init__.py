"""Logits over a vocabulary, with what a loss needs of each row of them."""

from brt.ops.token_logits.api import Scored as Scored
from brt.ops.token_logits.api import token_logits as token_logits
