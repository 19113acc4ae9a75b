"""What low precision costs in validation loss: small models under every precision of a CPU, by ``lowprec compare``."""
