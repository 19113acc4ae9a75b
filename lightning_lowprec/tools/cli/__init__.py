"""The ``lowprec`` command: parses arguments and prints results."""
