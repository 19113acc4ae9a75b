"""Low precision under DeepSpeed's ZeRO: configuration, conversion before ``initialize``, refusals."""
