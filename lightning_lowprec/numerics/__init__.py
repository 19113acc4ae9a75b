"""Number formats, scaling, rounding and flat buffers: pure functions and small dataclasses."""
