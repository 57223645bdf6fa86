"""Runs on several devices and processes: the mesh, sharding rules, and coordination."""
