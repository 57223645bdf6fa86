"""Settings of the decoder's attention windows."""

import dataclasses

from brt.config.checks import check, check_finite, check_not_negative
from brt.config.fields import adaptable, inherited


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """Settings of sliding windows, whose length is `Model.window`, and of blocks of tokens."""

    # Number of tokens of a block. Documents start at the start of a block, and recurrent states
    # change at its end. 0 takes Model.window.
    block: int = adaptable(0)
    # Windows of the layers in tokens, lowest layer first; the pattern repeats up to the highest
    # layer. 0 stands for Model.window, and an empty pattern gives all layers Model.window.
    by_layer: tuple[int, ...] = adaptable(())
    # Number of first tokens of a document that the layers with the window Model.window can always
    # attend to (Xiao et al. 2023). Models that were pretrained without a window predict badly
    # in a window without these tokens.
    sinks: int = adaptable(0)
    # False lets a block attend only to itself, as in a vanilla transformer.
    cache: bool = adaptable(True)
    # False lets the zero keys of the empty cache take part in attention at the start of a document,
    # as in the authors' code of Block-Recurrent Transformers.
    mask_empty_cache: bool = adaptable(True)
    # False lets a token attend to the Model.window tokens before itself, and not to itself, as in
    # the authors' code of Block-Recurrent Transformers.
    attend_to_self: bool = inherited(True)

    def __post_init__(self) -> None:
        check_finite(self)
        check_not_negative(self, "block", "sinks")
        check(
            not any(window < 0 for window in self.by_layer),
            f"Window.by_layer = {self.by_layer} must not be negative",
        )
        check(
            not self.sinks or (self.cache and self.mask_empty_cache),
            f"Window.sinks = {self.sinks} needs Window.cache = True and Window.mask_empty_cache = "
            "True",
        )
