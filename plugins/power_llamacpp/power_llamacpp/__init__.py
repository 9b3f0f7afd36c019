"""Power's llama.cpp target backend."""
