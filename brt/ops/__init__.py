"""The papers' arithmetic as pure functions, one folder per kind of attention."""
