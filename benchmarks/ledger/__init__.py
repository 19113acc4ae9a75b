"""The ledger: what a GPU would be asked to do, counted on a machine without one."""
