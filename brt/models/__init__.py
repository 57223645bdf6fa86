"""Complete models. Importing this package registers all kinds of layers that come with brt."""

import brt.memories  # noqa: F401  # registers its kinds
