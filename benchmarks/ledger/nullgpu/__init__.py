"""The null GPU: C++ and the script that writes the rest of it."""
