"""What models exist: their shapes, files and formats. Pure facts; no hardware, no engine."""
