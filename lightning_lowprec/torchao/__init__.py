"""The torchao backend: FP8 linear layers whose scales are computed from each tensor."""
