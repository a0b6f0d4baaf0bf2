"""Reranking, as Jina, Cohere, llama.cpp's server and text-embeddings-inference write it."""
