"""Make quants of model files, and measure what a quant costs."""
