"""The arithmetic of the models (attention, recurrent cells, losses) as pure functions of arrays.

Each op has a folder; its contract stands in `api.py`, not in its implementations. The argument
`implementation` names one of the implementations, and None selects the first that supports the
inputs (`brt.ops.dispatch`). Attention computes its softmax in float32 and returns the dtype of the
values. In shapes, unless a module says otherwise, B is the number of rows of the batch, T the
number of tokens, H the number of heads, K the size of a head, and *B stands for any leading axes.
Rows of the batch are also called lanes. In the docstrings of modules for TPUs, however, lanes are
those of a vector register (`brt.ops.tpu.LANES`).
"""
