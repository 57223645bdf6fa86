"""Memory tasks: documents that ask for what they told long before."""
