"""The ``lowprec`` command: parsing and printing only."""
