"""Layers: modules that own parameters and call the plain functions of `brt.ops`."""
