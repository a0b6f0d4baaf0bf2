"""The models that exist: their shapes, files and formats. Facts only; no hardware, no engine."""
