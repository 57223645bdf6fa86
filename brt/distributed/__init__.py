"""Many devices, many processes: what lies where, who writes, who stops."""
