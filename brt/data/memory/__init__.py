"""Memory tasks: generated documents that ask for facts which they stated long before."""
