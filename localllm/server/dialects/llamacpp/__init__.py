"""llama.cpp's own server API, and LM Studio's model list."""
