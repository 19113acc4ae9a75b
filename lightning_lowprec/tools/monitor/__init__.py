"""``lowprec monitor``: show what a NumericsMonitor has written."""
