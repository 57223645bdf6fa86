"""The arithmetic of the models (attention, recurrent cells, losses) as pure functions of arrays.

Each op has a folder; its contract stands in `api.py`, not in its implementations. The argument
`implementation` names one of these; None selects the first that supports the inputs
(`brt.ops.dispatch`). Attention computes its softmax in float32 and returns the dtype of the values.
In shapes, unless a module says otherwise, B is the number of rows of the batch, T of tokens and H
of heads, K is the size of a head, and *B stands for any leading axes. Rows are also called lanes,
except in modules for TPUs, whose registers have lanes (`brt.ops.tpu.LANES`).
"""
