"""Memory, time and costs of a run on other machines, according to the machines' compilers."""
