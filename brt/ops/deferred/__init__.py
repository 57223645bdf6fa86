"""Products inside a scan whose weight gradients are computed once, after it.

The transpose of a scan adds x_t^T dy_t to a weight's gradient at every step: half of the
serial work, in products too small to run well. Nothing in the scan needs that sum. So the
scan's backward pass only hands out the pairs (x_t, dy_t), and one product of all steps
makes the gradient of them.

A `Tap` carries the pairs: zeros on the way forward, of which nothing is read; on the way
back its "gradient" is the pair. One tap is for one use of its kernels in a step: of two, the
pairs would be added up. Uses without a tap have gradients of their own, as ever.
"""

from brt.ops.deferred.products import dot as dot
from brt.ops.deferred.products import dots as dots
from brt.ops.deferred.products import joined as joined
from brt.ops.deferred.products import relu_mlp as relu_mlp
from brt.ops.deferred.taps import LayerTaps as LayerTaps
from brt.ops.deferred.taps import Tap as Tap
from brt.ops.deferred.taps import layer_taps as layer_taps
from brt.ops.deferred.taps import of_step as of_step
from brt.ops.deferred.taps import tap as tap
