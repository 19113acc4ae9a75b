"""The ``lowprec`` command line and what it runs."""
