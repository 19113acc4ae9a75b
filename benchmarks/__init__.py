"""What measures: scripts, and results/ as committed figures."""
