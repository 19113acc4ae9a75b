"""Who trains the models of the ledger and of ``python -m benchmarks.gpu``: what a user would pick instead, and ours."""
