"""The arithmetic of the models (attention, recurrent cells, losses) as pure functions of arrays.

Each kind of attention has a folder of its own.
"""
