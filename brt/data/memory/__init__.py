"""Memory tasks: generated documents that state facts, and ask for the facts much later."""
