"""Models of other code bases."""
