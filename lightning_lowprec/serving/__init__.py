"""Models in the formats that servers load: Hugging Face folders in high precision, and FP8."""
