"""Private names of other libraries: one guarded file per library.

Each file has ``moved()``, which lists in words the names that the installed version no longer has; ``lowprec doctor``
prints the lists.
"""
