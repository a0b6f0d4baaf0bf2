"""Device × Model × Workload → Plans: how many bytes, how fast, and why. Pure: no I/O, no clock, no
engine."""
