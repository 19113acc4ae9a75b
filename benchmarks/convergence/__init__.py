"""Does low precision end with the loss of float32? Four small models, every precision of a CPU, five seeds."""
