"""The APIs clients speak. Each only translates: a body to a ChatRequest or a GenerationJob, and a
generation to its reply."""
