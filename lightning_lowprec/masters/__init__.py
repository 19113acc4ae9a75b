"""Keep float32 masters for half-precision weights, inside the user's own optimizer."""
