"""Sharding models that compute in low precision, and what goes over the wire."""
