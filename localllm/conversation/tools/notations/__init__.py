"""One file for each way models write tool calls (kin share one); a file names its formats in FORMATS, and that registers them."""
