"""What is measured on a GPU, beside what a user would pick instead: ``python -m benchmarks.gpu_lane``."""
