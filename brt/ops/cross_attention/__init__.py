"""Cross-attention of a decoder to its source: six kinds with one interface."""

from brt.ops.cross_attention.api import attend as attend
from brt.ops.cross_attention.cache import CrossCache as CrossCache
from brt.ops.cross_attention.cache import advance as advance
from brt.ops.cross_attention.cache import prefill as prefill
from brt.ops.cross_attention.cache import step as step
from brt.ops.cross_attention.config import CrossConfig as CrossConfig
from brt.ops.cross_attention.parameters import CrossParameters as CrossParameters
from brt.ops.cross_attention.parameters import ParameterSpec as ParameterSpec
from brt.ops.cross_attention.parameters import initial_parameters as initial_parameters
from brt.ops.cross_attention.parameters import parameters_from as parameters_from
from brt.ops.cross_attention.parameters import specifications as specifications
from brt.ops.cross_attention.recurrence import NeuronMetrics as NeuronMetrics
