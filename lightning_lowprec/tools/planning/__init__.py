"""The logic of ``lowprec plan``: models on the meta device, and the costs of their plans."""
