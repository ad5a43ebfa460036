"""What a call asks for (`problem`), what is remembered between calls (`plan`, `map_cache`), and what is kept on disk (`store`)."""
