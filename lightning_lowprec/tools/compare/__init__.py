"""The logic of ``lowprec compare``: train one model with the same data and seed under several precisions."""
