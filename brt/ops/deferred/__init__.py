"""Matrix products inside a scan whose weight gradients are computed once, after the scan.

For a product y = x W, the backward pass of a scan computes two products at every step t: the
gradient of x_t, and x_t^T dy_t, which it adds to the gradient of the weight W. The second product
is too small to run efficiently, and no other step needs it. Here, the backward scan therefore only
returns the pairs (x_t, dy_t), and one product over all steps computes the weight's gradient from
the pairs.

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
