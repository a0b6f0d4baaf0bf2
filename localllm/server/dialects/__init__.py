"""The APIs that clients use. Each dialect only translates: a body to a ChatRequest or a
GenerationJob, and a generation to its reply."""
