"""``lowprec plan --fits``: the memory of a step, on a simulated GPU. Only the command opens this folder."""
