"""Matrix products inside a scan whose weight gradients are computed once, after the scan.

The backward pass of a scan adds x_t^T dy_t to a weight's gradient at every step t. This is half of
the serial work, in products too small to run efficiently, and nothing in the scan depends on the
sum. Here, the backward scan only returns the pairs (x_t, dy_t), and one product over all steps
computes the gradient from them.

A `Tap` carries the pairs out of the scan. In the forward pass, a tap consists of zeros that nothing
reads; in the backward pass, the "gradient" of the tap at step t is the pair (x_t, dy_t). Each use
of a kernel in a step needs a tap of its own, because JAX would add up the pairs of two uses. A
kernel that is used without a tap has an ordinary gradient.
"""

from brt.ops.deferred.products import dot as dot
from brt.ops.deferred.products import dot_of_parts as dot_of_parts
from brt.ops.deferred.products import dots as dots
from brt.ops.deferred.products import relu_mlp as relu_mlp
from brt.ops.deferred.taps import LayerTaps as LayerTaps
from brt.ops.deferred.taps import Tap as Tap
from brt.ops.deferred.taps import layer_taps as layer_taps
from brt.ops.deferred.taps import stack_layers as stack_layers
from brt.ops.deferred.taps import tap as tap
