"""Private names of other libraries: one guarded file per library.

Each file has ``moved()``, which lists in words the names that the installed version no longer has; ``lowprec doctor``
prints the lists. The names of torch's FSDP2 (``fsdp2.py``) are in the list of ``torch.py``.
"""
