"""Arithmetic of the papers as pure functions of arrays; each kind of attention has a folder."""
