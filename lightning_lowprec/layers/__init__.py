"""Which layers of a model convert, and what becomes of them."""
