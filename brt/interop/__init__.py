"""Import of models from other libraries, and export of models to the formats of other libraries."""
