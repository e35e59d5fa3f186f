"""What each route reads, asks of the engine, and writes."""
