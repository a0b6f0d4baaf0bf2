"""One file for each way models write tool calls (kin share one): what it names in FORMATS is
registered."""
