"""The ``lowprec`` command line and the logic behind its commands."""
