"""The prototypes of torchao that this package trains with: int8 products, and MXFP8 products."""
